"""Which replica answers: who has the beginning of the prompt, then who has least to do. No Ray in here.

A prompt is known by the hashes of its blocks, each over everything before it too, as prefix caches have them. Where a
prefix is known to be comes from what caches report, and as long as a report may be late from where prompts were sent. A
prompt that is new everywhere goes by rendezvous hashing of its session, or of its first block: every front sends it the
same way, and a replica that comes or goes moves only its own share.

The favourite has to be worth waiting for. It is compared with the less busy of two others, drawn at random, and loses
when it has `slack` more answers to make: a hot prefix spreads over as many replicas as it needs, which have it then.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Generic, Literal, Protocol, TypeVar, get_args

BLOCK = 64  # tokens
BLOCKS = 512  # of a prompt that are looked at: after so many, prompts of one kind have parted
KEPT = 200_000  # prefixes that are remembered, all replicas together
LATE = 30.0  # seconds after which a replica that reports has what it was sent only if it says so
SLACK = 4  # answers more than another one: so much is a prefix worth

Policy = Literal["prefix", "queue", "round-robin"]
POLICIES: tuple[str, ...] = get_args(Policy)
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Route:
    """What is known of a request before it is sent anywhere."""

    chain: tuple[int, ...] = ()  # hashes of the whole blocks of its prompt, each with all before it
    session: str = ""  # what its client calls the conversation
    model: str = ""  # the fingerprint of the model that it is for

    @property
    def home(self) -> str:
        """Requests with the same one begin in the same place."""
        return self.session or (str(self.chain[0]) if self.chain else "")


def chain_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the whole blocks.

    >>> one, two = chain_of([7] * 128), chain_of([7] * 64 + [8] * 64)
    >>> len(one), one[0] == two[0], one[1] == two[1]
    (2, True, False)
    """
    before, found = b"", []
    for block in range(min(len(tokens) // BLOCK, BLOCKS)):
        before = block_name(before, tokens[block * BLOCK : (block + 1) * BLOCK])
        found.append(int.from_bytes(before, "big"))
    return tuple(found)


def block_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a whole block that stands after the one called `before`; nothing stands before the first."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a replica's cache has, or its latest changes, which add to earlier reports."""

    life: str  # of the cache; when it has lost everything it begins another one
    number: int  # of changes in this life until now
    changes: tuple[int, ...]  # the latest, oldest first: a block that is there, or `~block`: it is gone
    whole: bool  # `changes` are all blocks that there are


class Prefixes(Generic[Key]):
    """Which replicas have which blocks, and until when that is believed. The least recently used are forgotten."""

    def __init__(self, most: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._places: OrderedDict[int, dict[Key, float]] = OrderedDict()
        self._blocks: dict[Key, set[int]] = {}  # the same by replica
        self._latest: dict[Key, CacheReport] = {}

    def stored(self, replica: Key, blocks: Iterable[int]) -> None:
        """It has them now."""
        self._believe(replica, blocks, math.inf)

    def sent(self, replica: Key, blocks: Iterable[int]) -> None:
        """It will have them soon. One that reports says so itself before long."""
        self._believe(replica, blocks, self._clock() + LATE if replica in self._latest else math.inf)

    def _believe(self, replica: Key, blocks: Iterable[int], until: float) -> None:
        own = self._blocks.setdefault(replica, set())
        for block in blocks:
            own.add(block)
            places = self._places.setdefault(block, {})
            places[replica] = max(until, places.get(replica, until))
            self._places.move_to_end(block)
        while len(self._places) > self._most:
            block, places = self._places.popitem(last=False)
            for place in places:
                self._blocks[place].discard(block)

    def removed(self, replica: Key, blocks: Iterable[int]) -> None:
        """It has them no longer."""
        own = self._blocks.get(replica, set())
        for block in blocks:
            if block in own:
                own.remove(block)
                del self._places[block][replica]
                if not self._places[block]:
                    del self._places[block]

    def reported(self, replica: Key, report: CacheReport) -> None:
        """What it says of its own cache. The same report may come again, and some may never come."""
        before = self._latest.get(replica)
        if before == report or (before is not None and before.life == report.life and before.number > report.number):
            return
        self._latest[replica] = report
        unheard = report.number - (0 if before is None or before.life != report.life else before.number)
        if before is None:  # it begins to report: what it was sent of late it may be about to read
            self._doubt(replica)
        elif before.life != report.life:
            self.removed(replica, list(self._blocks.get(replica, ())))
        elif report.whole or unheard > len(report.changes):
            self.removed(replica, self._told(replica) - (set(report.changes) if report.whole else set()))
        fresh = report.changes if report.whole else report.changes[max(0, len(report.changes) - unheard) :]
        for change in fresh:
            if change >= 0:
                self.stored(replica, (change,))
            else:
                self.removed(replica, (~change,))

    def _doubt(self, replica: Key) -> None:
        until = self._clock() + LATE
        for block in self._blocks.get(replica, ()):
            self._places[block][replica] = until

    def _told(self, replica: Key) -> set[int]:
        """Blocks that it reported."""
        return {block for block in self._blocks.get(replica, ()) if self._places[block][replica] == math.inf}

    def keep(self, replicas: Iterable[Key]) -> None:
        """All others are gone, with all they had."""
        for replica in (self._blocks.keys() | self._latest.keys()) - set(replicas):
            self.removed(replica, list(self._blocks.get(replica, ())))
            self._blocks.pop(replica, None)
            self._latest.pop(replica, None)

    def longest(self, chain: Sequence[int], among: Collection[Key]) -> set[Key]:
        """The replicas that have most of the chain's beginning; none, where no replica has any of it.

        A cache gives up the end of a prefix before its beginning: a replica that has a block has all before it.
        """
        now = self._clock()
        for block in reversed(chain):
            places = self._places.get(block, {})
            here = {replica for replica, until in places.items() if replica in among and until > now}
            if here:
                return here
        return set()


class Chooser(Protocol[Key]):
    """The one decision. `queues`: answers that each replica has to make, None where that is not known."""

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key: ...

    def sent(self, route: Route, replica: Key) -> None:
        """It was sent there."""
        ...


class ByPrefix(Generic[Key]):
    """The longest prefix first, then the shortest queue."""

    def __init__(self, seed: int | None = None, slack: int = SLACK) -> None:
        self.prefixes: Prefixes[Key] = Prefixes()  # reports of prefix caches go here
        self._dice, self._slack = random.Random(seed), slack

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:
        """A replica whose queue is not known is taken for an idle one."""
        replicas = list(queues)
        other = _shorter(self._dice, replicas, queues)
        favourite = self._favourite(route, replicas, queues)
        if favourite is None or (queues[favourite] or 0) > (queues[other] or 0) + self._slack:
            return other
        return favourite

    def _favourite(self, route: Route, replicas: Sequence[Key], queues: dict[Key, int | None]) -> Key | None:
        best = self.prefixes.longest(route.chain, queues.keys())
        if best:
            return min(best, key=lambda key: (queues[key] or 0, str(key)))
        return rendezvous(route.home, replicas) if route.home else None

    def sent(self, route: Route, replica: Key) -> None:
        """Until its cache reports: a replica that reads a prompt has it."""
        self.prefixes.sent(replica, route.chain)


class ByQueue(Generic[Key]):
    """The shorter queue of two, drawn at random."""

    def __init__(self, seed: int | None = None) -> None:
        self._dice = random.Random(seed)

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:  # noqa: ARG002
        """See `Chooser`."""
        return _shorter(self._dice, list(queues), queues)

    def sent(self, route: Route, replica: Key) -> None:
        """It makes no difference."""


class InTurn(Generic[Key]):
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, route: Route, queues: dict[Key, int | None]) -> Key:  # noqa: ARG002
        """See `Chooser`."""
        replicas = sorted(queues, key=str)
        return replicas[next(self._turns) % len(replicas)]

    def sent(self, route: Route, replica: Key) -> None:
        """It makes no difference."""


def make_chooser(policy: Policy, seed: int | None = None) -> Chooser[str]:
    """By its name."""
    if policy == "round-robin":
        return InTurn()
    return ByPrefix(seed) if policy == "prefix" else ByQueue(seed)


def rendezvous(home: str, replicas: Sequence[Key]) -> Key:
    """The replica that a beginning belongs to: the highest draw of a lottery that both names decide."""
    return max(replicas, key=lambda replica: blake2b(f"{home}\0{replica}".encode(), digest_size=8).digest())


def _shorter(dice: random.Random, replicas: Sequence[Key], queues: dict[Key, int | None]) -> Key:
    """Power of two choices: nearly as good as the shortest of all, and no herd follows the same old news."""
    return min(dice.sample(replicas, min(2, len(replicas))), key=lambda key: queues[key] or 0)
