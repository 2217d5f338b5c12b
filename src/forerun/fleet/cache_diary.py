"""What the prefix cache of a replica did, in the words of routers: blocks of 64 tokens instead of pages.

Pages have their own size and names that depend on salts and pictures; a front has only the tokens of a prompt. So the
diary walks the tokens of each text that is stored and names its blocks as `chain_of` does. A block counts as there as
long as any page that ends it is there.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from dataclasses import dataclass

from forerun.cache.prefix import AllRemoved, PageEvent, PageRemoved, PageStored
from forerun.fleet.routing import BLOCK, BLOCKS, CacheReport, block_name

LATEST = 1024  # changes in a report
WHOLE_EVERY = 30  # reports: one of so many has all blocks, for routers that are new or have missed some


@dataclass(frozen=True, slots=True)
class TextSoFar:
    """Where a text stands after a page."""

    count: int = 0  # of its whole blocks
    name: bytes = b""  # of the last of them
    rest: tuple[int, ...] = ()  # tokens behind that one
    ended: tuple[int, ...] = ()  # blocks that end in this very page


class CacheDiary:
    """`hear` on the engine's thread, `report` on any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports = 0
        self._begin()

    def _begin(self) -> None:
        self._life = secrets.token_hex(8)
        self._number = 0
        self._latest: deque[int] = deque(maxlen=LATEST)
        self._pages: dict[bytes, TextSoFar] = {}
        self._blocks: Counter[int] = Counter()  # by how many pages end them

    def hear(self, event: PageEvent) -> None:
        """See `PrefixIndex.listen`."""
        with self._lock:
            if isinstance(event, AllRemoved):
                self._begin()
            elif isinstance(event, PageRemoved):
                self._remove(event)
            else:
                self._store(event)

    def report(self) -> CacheReport:
        """For routers. Nothing changes in it while nothing happens, but that some reports are whole."""
        with self._lock:
            whole = self._reports % WHOLE_EVERY == 0
            self._reports += 1
            return CacheReport(self._life, self._number, tuple(self._blocks if whole else self._latest), whole)

    def _store(self, event: PageStored) -> None:
        before = TextSoFar() if event.parent is None else self._pages.get(event.parent)
        if before is None:  # the page before it has been removed: no request finds this one
            return
        count, name, rest, ended = before.count, before.name, before.rest + event.tokens, []
        while len(rest) >= BLOCK:
            name, rest, count = block_name(name, rest[:BLOCK]), rest[BLOCK:], count + 1
            if count <= BLOCKS:
                ended.append(int.from_bytes(name, "big"))
        self._pages[event.key] = TextSoFar(count, name, rest, tuple(ended))
        for block in ended:
            self._blocks[block] += 1
            if self._blocks[block] == 1:
                self._note(block)

    def _remove(self, event: PageRemoved) -> None:
        page = self._pages.pop(event.key, None)
        for block in () if page is None else page.ended:
            self._blocks[block] -= 1
            if not self._blocks[block]:
                del self._blocks[block]
                self._note(~block)

    def _note(self, change: int) -> None:
        self._number += 1
        self._latest.append(change)
