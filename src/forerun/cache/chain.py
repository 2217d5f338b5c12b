"""The text of one sequence in pages: its beginning is found in the prefix cache, committed rows are published there."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from forerun.cache.groups import HOLE
from forerun.cache.prefix import CachedPage, PrefixIndex
from forerun.cache.recurrent import SlotContents

# By row drafter the positions from which and up to which its entries are true; None: up to the last committed one.
Entries = Mapping[str, tuple[int, int | None]]
NO_ENTRIES: Entries = MappingProxyType({})
NAME = 16  # bytes of a page's name
OPENING = 4  # tokens, at most, that begin an answer in its prompt and not once its thoughts were dropped
STATE_EVERY = 4096  # tokens of a prompt between two recurrent states that are kept in any case


@dataclass(slots=True)
class Found:
    """What the index has of a text."""

    pages: list[CachedPage]  # that a sequence may begin with
    matched: int  # tokens of the longest run of pages; recurrent state may be there for fewer
    parts: bool = False  # does another text go on from there otherwise?


@dataclass(slots=True, eq=False)
class PageChain:
    """The names of a sequence's pages, and those of them that are in the index."""

    index: PrefixIndex
    tokens: list[int]  # the sequence's own list, which grows
    prompt: int  # of them that the prompt has
    salt: bytes = b""  # texts with another salt never meet
    media: Sequence[bytes] = ()  # of the first pages, see `CachedPage.media`
    pages: list[CachedPage] = field(default_factory=list)  # from the beginning of the text on
    left: int = 0  # of them that the sequence does not use any more: no row to come sees them
    checkpoints: set[int] = field(default_factory=set)  # tokens of the prompt after which recurrent state is kept
    parting: set[int] = field(default_factory=set)  # of those where another text is known to part from this one
    limit: int | None = field(init=False)  # tokens from which on nothing is published; None: everything is
    _keys: list[bytes] = field(default_factory=list)
    _answer_state: CachedPage | None = None  # the last page of the answer that got a state

    def __post_init__(self) -> None:
        index = self.index
        self.limit = None if index.answers else self.prompt // index.grain * index.grain

    @property
    def due(self) -> int:
        """Tokens with which the next page is full."""
        return (len(self.pages) + 1) * self.index.page

    @property
    def used(self) -> list[CachedPage]:
        """Pages that count the sequence among their users."""
        return self.pages[self.left :]

    def key(self, number: int) -> bytes:
        """The name of page `number` of the text, which must be full."""
        while len(self._keys) <= number:
            before = self._keys[-1] if self._keys else hashlib.blake2b(self.salt, digest_size=NAME).digest()
            at = len(self._keys)
            text = array("q", self._tokens(at)).tobytes()
            self._keys.append(hashlib.blake2b(before + text + self._media(at), digest_size=NAME).digest())
        return self._keys[number]

    def _tokens(self, number: int) -> tuple[int, ...]:
        page = self.index.page
        return tuple(self.tokens[number * page : (number + 1) * page])

    def _media(self, number: int) -> bytes:
        return self.media[number] if number < len(self.media) else b""

    def look_up(self, border: Callable[[int], int] | None = None) -> Found:
        """What the index has of the prompt but its last token, whose row gives the first logits.

        `border`: where a pass that would end there may end.
        """
        index, found, parent = self.index, list[CachedPage](), None
        for number in range((self.prompt - 1) // index.page):
            page = index.get(self.key(number), parent, self._tokens(number), self._media(number))
            if page is None:
                break
            found.append(page)
            parent = page
        matched, parts = len(found) * index.page, bool(found) and found[-1].continued
        while found:
            end = len(found) * index.page
            whole = end % index.grain == 0 and (border is None or border(end) == end)
            if whole and (index.states is None or index.state_of(found[-1]) is not None):
                break
            found.pop()
        return Found(found, matched, parts)

    def take(self, found: Found) -> None:
        """Begin with what was found, and plan where recurrent state is kept for the next one."""
        for page in found.pages:
            page.found = True
            self.index.use(page)
            self.pages.append(page)
        if found.pages:
            self.index.begin_behind(found.pages[-1])
        if self.index.most_states:
            stride, start = self.index.stride, len(found.pages) * self.index.page
            matched = found.matched // stride * stride
            self.parting = {matched} if found.parts else set()
            wanted = {(self.prompt - 1) // stride * stride, (self.prompt - OPENING) // stride * stride, matched}
            wanted |= set(range(STATE_EVERY // stride * stride, self.prompt, STATE_EVERY // stride * stride))
            self.checkpoints = {at for at in wanted if start < at < self.prompt and at % self.index.grain == 0}

    def entries(self) -> dict[str, int]:
        """Row drafters whose entries the pages hold, and the position from which they are all there."""
        found = {}
        for name in self.pages[-1].entries if self.pages else ():
            number = len(self.pages)
            while number and name in self.pages[number - 1].entries:
                number -= 1
            found[name] = number * self.index.page
        return found

    def shared_with(self, other: PageChain) -> int:
        """Tokens, in full pages, with which the prompts of both begin, as far as the other one publishes them."""
        end = min(self.prompt - 1, other.prompt) if other.limit is None else min(self.prompt - 1, other.limit)
        number = 0
        while (number + 1) * self.index.page <= end and self.key(number) == other.key(number):
            number += 1
        return number * self.index.page

    def will_offer(self, shared: int, length: int) -> int:
        """Where a hit will end for a prompt that shares so many tokens, when `length` of them are committed by now.

        Where there is recurrent state, it is kept at the end of what is shared, if that is still to come.
        """
        index = self.index
        end = shared // index.grain * index.grain
        if index.states is None:
            return end
        if not index.most_states:
            return 0
        end = end // index.stride * index.stride
        if end > length and end % index.grain == 0:
            self.checkpoints.add(end)
            self.parting.add(end)
        return max((at for at in self.checkpoints if length < at <= end), default=0)

    def cut(self, start: int, stop: int) -> int:
        """Where a pass from `start` on that may end at `stop` ends, so that there is a state to keep."""
        return min((at for at in self.checkpoints if start < at < stop), default=stop)

    def publish(
        self, blocks: Sequence[list[int]], before: int, length: int, features: Tensor | None, entries: Entries
    ) -> bool:
        """The rows from `before` to `length` were committed: full pages among them can be found from now on.

        features [rows, …] of those rows. Where the index has a page of this text already, the sequence takes that one
        and gives its own back, or the index takes the sequence's, which has entries of more drafters. Returns whether
        `blocks`, the sequence's block table by group, was changed.
        """
        index, changed = self.index, False
        end = min(length, len(self.tokens)) if self.limit is None else min(length, self.limit)
        while self.due <= end:
            number = len(self.pages)
            parent, mine = (self.pages[-1] if self.pages else None), [held[number] for held in blocks]
            key, tokens, media = self.key(number), self._tokens(number), self._media(number)
            page = index.get(key, parent, tokens, media)
            first, behind = number * index.page, (number + 1) * index.page
            true = frozenset(n for n, (start, stop) in entries.items() if start <= first and (stop or behind) >= behind)
            some = {n for n, (start, stop) in entries.items() if start < behind and (stop is None or stop > first)}
            if page is not None and not page.resident:
                if HOLE in mine:
                    self.limit = 0
                    break
                index.adopt(page, mine)
                page.entries = true
            elif page is not None and not some <= page.entries and HOLE not in mine:
                index.exchange(page, mine)
                page.entries = true
            elif page is not None:
                for group, held, own, shared in zip(index.groups, blocks, mine, page.pages, strict=True):
                    if own != HOLE:
                        group.share([shared])
                        held[number] = shared
                        group.give_back([own])
                changed = True
            elif HOLE in mine or (parent is not None and not parent.listed):
                self.limit = 0  # nothing behind it could ever be reached
                break
            else:
                page = index.add(key, parent, tokens, media, mine)
                page.entries = true
            index.use(page)
            self.pages.append(page)
            last = (number + 1) * index.page - 1 - before
            if page.edge is None and features is not None and 0 <= last < len(features):
                page.edge = features[last].clone()
        return changed

    def state_due(self, before: int, length: int) -> CachedPage | None:
        """The page whose last row is among those from `before` to `length`, if recurrent state is to be kept there."""
        stride, page = self.index.stride, self.index.page
        at = length // stride * stride
        wanted = at >= self.prompt or at in self.checkpoints
        if at <= before or at // page > len(self.pages) or not wanted or not self.index.most_states:
            return None
        due = self.pages[at // page - 1]
        return due if due.listed and self.index.state_of(due) is None else None

    def keep_state(self, page: CachedPage, at: int, contents: SlotContents) -> None:
        """Of an answer the latest state is enough."""
        self.index.keep_state(page, contents, at in self.parting)
        if at >= self.prompt:
            before, self._answer_state = self._answer_state, page
            if before is not None and not before.hits:
                self.index.drop_state(before)

    def leave_first(self, count: int) -> None:
        """No row to come sees the first `count` pages of the text."""
        count = min(count, len(self.pages))
        if count > self.left:
            leaving, self.left = self.pages[self.left : count], count
            self.index.leave(leaving)

    def release(self) -> None:
        """The sequence uses none of them any more."""
        used, self.pages, self.left = self.used, [], 0
        self.index.leave(used)
