"""The prefix cache: full pages stay after their sequence and are found again by the text they hold.

A page is named by a hash of its tokens, its media and the name of the page before it. On a hit the tokens themselves
are compared, and so is the page before, so that no two texts are ever taken for one another. Pages are published when
their rows are committed: no draft is ever in one. A page that no sequence uses is free memory for any sequence that
needs pages. Pages that were found at least once outlive pages that were not: a system prompt survives many requests
that never come again. What has to go is copied to host memory, where that is another memory than the pool's, and comes
back when its text does. Pages that came from a file of an earlier run stay in it (`cache/prefix_file.py`): they come in
when their text does, and when they have to go they are only forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.cache.groups import PageGroup

if TYPE_CHECKING:
    from forerun.cache.chain import PageChain
    from forerun.cache.device_recurrent import DeviceStates
    from forerun.cache.prefix_file import StoredPage
    from forerun.cache.recurrent import SlotContents, StateSlots

FOUND_SHARE = 0.8  # of all pages and states, at most, that outlive newer ones because they were found before
STRIDE = 64  # tokens, at multiples of which recurrent state may be kept
MOST_SAVED = 4096  # tokens that a recurrent state is said to save, at most: prompts leave states every so often anyway


@dataclass(frozen=True, slots=True)
class PageStored:
    """A full page can be found from now on. One that moves to the other memory is removed there and stored here."""

    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    media: bytes = b""  # see `CachedPage.media`
    resident: bool = True  # in the pool, or else in host memory


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """A page is gone."""

    key: bytes
    resident: bool = True  # it was in the pool, or else in host memory


@dataclass(frozen=True, slots=True)
class AllRemoved:
    """All pages are gone."""


PageEvent = PageStored | PageRemoved | AllRemoved


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page of text in the index: one page of every group, all of the same tokens."""

    key: bytes
    parent: CachedPage | None
    tokens: tuple[int, ...]
    media: bytes  # a digest of what stands in place of placeholders among the tokens; empty for plain text
    pages: list[int]  # by page group; none while it is in host memory or in a file alone
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values by page group, in host memory
    users: int = 0  # sequences whose text it is part of
    found: bool = False  # did a later sequence find it?
    listed: bool = True  # is it still in the index?
    entries: frozenset[str] = frozenset()  # row drafters whose entries it holds as well
    edge: Tensor | None = None  # [features] of its last row, from which a drafter goes on
    state: SlotContents | None = None  # recurrent state after its last row
    moment: int = 0  # when the state was made, or a sequence last began behind it: see `PrefixIndex.keep_state`
    hits: int = 0  # sequences that began behind it
    parts: bool = False  # texts part there: several go on from it
    continued: bool = False  # was a page published behind it?
    stored: StoredPage | None = None  # where a file has it

    @property
    def resident(self) -> bool:
        """Is it in the pool?"""
        return bool(self.pages)

    def from_file(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values by page group: views of the file."""
        assert self.stored is not None, "a page is in the pool, in host memory or in a file"
        return self.stored.contents()

    @property
    def news(self) -> PageStored:
        """What listeners are told of it."""
        parent = None if self.parent is None else self.parent.key
        return PageStored(self.key, parent, self.tokens, self.media, self.resident)

    @property
    def copied_bytes(self) -> int:
        """Of host memory."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.copies)


class PrefixIndex:
    """All cached pages of a pool. Each holds its pages as a sequence does; `users` counts the sequences beside it."""

    def __init__(self, groups: Sequence[PageGroup], states: StateSlots | DeviceStates | None, page: int) -> None:
        self.groups, self.states, self.page = groups, states, page
        self.enabled = False  # an engine switches it on
        self.grain = page  # a hit ends at a multiple of so many tokens
        self.answers = True  # are rows of answers computed as those of prompts, so that they are kept as well?
        self.stride = lcm(STRIDE, page)
        self.most_states = 0 if states is None else states.count // 2  # recurrent states kept in pages
        self.host_limit = self.host_bytes = 0  # of copies in host memory
        self._pages: dict[bytes, CachedPage] = {}
        # Pages without users, the least recently used first: those of texts that came once, and those found again.
        self._once: OrderedDict[CachedPage, None] = OrderedDict()
        self._again: OrderedDict[CachedPage, None] = OrderedDict()
        self._away: OrderedDict[CachedPage, None] = OrderedDict()  # in host memory, without users
        self._filed: OrderedDict[CachedPage, None] = OrderedDict()  # in a file alone, without users
        self._stateful: dict[CachedPage, None] = {}  # pages with a state in memory
        self._moment = 0  # counts the states that were ever kept
        self._listeners: list[Callable[[PageEvent], None]] = []

    def serve(self, *, any_row: bool, chunk: int, host_limit: int = 0) -> None:
        """Switch it on. `any_row`: all rows are of one kind; else prompts are read in chunks of their own, whose rows
        are there for the next one only where all of the chunk is. `host_limit`: bytes of copies in host memory.
        """
        self.enabled, self.answers, self.host_limit = True, any_row, host_limit
        self.grain = self.page if any_row else lcm(self.page, chunk)

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def idle(self) -> int:
        """Pages that no sequence uses."""
        return len(self._once) + len(self._again)

    def listen(self, listener: Callable[[PageEvent], None]) -> None:
        """Tell `listener` what there is, and then every event on the engine's thread; it must return at once."""
        for page in self._pages.values():
            listener(page.news)
        self._listeners.append(listener)

    def _tell(self, event: PageEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def get(self, key: bytes, parent: CachedPage | None, tokens: tuple[int, ...], media: bytes) -> CachedPage | None:
        """The page of this text; what only has the same name is another page."""
        page = self._pages.get(key)
        if page is None or page.parent is not parent or page.tokens != tokens or page.media != media:
            return None
        if not page.resident and not page.copies and page.stored is not None and not page.stored.is_sound():
            self._drop([page])
            return None
        return page

    def restore(self, pages: Sequence[CachedPage]) -> None:
        """A file has these, the most valuable first. They come into the pool when their text comes."""
        for page in reversed(pages):
            self._filed[page] = None
        for page in pages:
            self._pages[page.key] = page
            self._tell(page.news)

    def by_worth(self) -> list[CachedPage]:
        """All pages: those in use, then the others, the most recently used first."""
        used = [page for page in self._pages.values() if page.users]
        return [*used, *(page for unused in self._unused for page in reversed(unused))]

    @property
    def _unused(self) -> tuple[OrderedDict[CachedPage, None], ...]:
        return self._again, self._once, self._away, self._filed

    def _place(self, page: CachedPage) -> OrderedDict[CachedPage, None]:
        """Where a page without users belongs."""
        if page.resident:
            return self._again if page.found else self._once
        return self._away if page.copies else self._filed

    def add(
        self, key: bytes, parent: CachedPage | None, tokens: tuple[int, ...], media: bytes, pages: list[int]
    ) -> CachedPage:
        """Publish pages that a sequence has filled; the index holds them as well from now on."""
        before = self._pages.pop(key, None)
        if before is not None:  # the page before it was removed and came back: this one is out of reach
            self._unlist(before)
        for group, number in zip(self.groups, pages, strict=True):
            group.share([number])
        page = CachedPage(key, parent, tokens, media, pages)
        self._pages[key] = page
        if parent is not None:
            parent.continued = True
        self._tell(page.news)
        return page

    def use(self, page: CachedPage) -> None:
        """One more sequence has this page in its text."""
        page.users += 1
        if page.users == 1:
            for unused in self._unused:
                unused.pop(page, None)

    def begin_behind(self, page: CachedPage) -> None:
        """A sequence begins with the text up to this page. The second one goes on otherwise than the first."""
        page.moment, page.hits = self._moment, page.hits + 1
        page.parts = page.parts or page.hits > 1

    def leave(self, pages: Iterable[CachedPage]) -> None:
        """A sequence leaves these pages, given in the order of its text: the last of them are the first to go."""
        for page in reversed(list(pages)):
            page.users -= 1
            if page.users == 0 and page.listed:
                self._place(page)[page] = None
        while len(self._again) > FOUND_SHARE * self.groups[0].count:
            page, _ = self._again.popitem(last=False)
            page.found = False
            self._once[page] = None

    def make_free(self, count: int) -> None:
        """Remove pages without users until every group has so many free ones, or there are no more."""
        while self.idle and (missing := max(count - group.free for group in self.groups)) > 0:
            leaving = list(islice(joined(self._once, self._again), missing))
            self._leave_to_file([page for page in leaving if page.stored is not None])
            leaving = [page for page in leaving if page.resident]
            if self.host_limit and leaving:
                self._copy_away(leaving)
            else:
                self._drop(leaving)

    def _leave_to_file(self, pages: Iterable[CachedPage]) -> None:
        """Their pages of the pool are free; the file still has them."""
        for page in pages:
            self._give_back(page)
            self._filed[page] = None
            self._tell_move(page, was_resident=True)

    def _give_back(self, page: CachedPage) -> None:
        """The pool's pages of one that no sequence uses."""
        held, page.pages = page.pages, []
        for group, number in zip(self.groups, held, strict=True):
            group.give_back([number])
        self._once.pop(page, None)
        self._again.pop(page, None)

    def _drop(self, pages: Iterable[CachedPage]) -> None:
        for page in pages:
            del self._pages[page.key]
            self._unlist(page)

    def _copy_away(self, pages: list[CachedPage]) -> None:
        """To host memory, from which the least recently used ones go for good."""
        copied = [group.copy([page.pages[number] for page in pages]) for number, group in enumerate(self.groups)]
        for at, page in enumerate(pages):
            page.copies = [(keys[:, at].clone(), values[:, at].clone()) for keys, values in copied]
            self.host_bytes += page.copied_bytes
            self._give_back(page)
            self._away[page] = None
            self._tell_move(page, was_resident=True)
        while self.host_bytes > self.host_limit and self._away:
            self._drop([next(iter(self._away))])

    def bring_back(self, pages: Iterable[CachedPage]) -> None:
        """These are in use: those among them that are in host memory or in a file get pages of the pool."""
        away = [page for page in pages if not page.resident]
        if not away:
            return
        self.make_free(len(away))
        contents = [page.copies or page.from_file() for page in away]
        taken = []
        for number, group in enumerate(self.groups):
            taken.append(group.take(len(away)))
            keys, values = (torch.stack([mine[number][part] for mine in contents], 1) for part in (0, 1))
            group.put(taken[-1], keys, values)
        for page, *held in zip(away, *taken, strict=True):
            page.pages = held
            self._has_come_back(page)
            if page.edge is None and page.stored is not None:
                page.edge = page.stored.edge(self.groups[0].device)

    def adopt(self, page: CachedPage, pages: list[int]) -> None:
        """A page in host memory or in a file was computed again: it is in the pool from now on."""
        for group, number in zip(self.groups, pages, strict=True):
            group.share([number])
        page.pages, page.stored = pages, None
        self._has_come_back(page)
        for unused in self._unused:
            unused.pop(page, None)
        if not page.users:
            self._once[page] = None

    def exchange(self, page: CachedPage, pages: list[int]) -> None:
        """Hold other pages with the same text; sequences that share the old ones keep them."""
        for group, old, new in zip(self.groups, page.pages, pages, strict=True):
            group.share([new])
            group.give_back([old])
        page.pages, page.stored = pages, None

    def _has_come_back(self, page: CachedPage) -> None:
        self._forget_copies(page)
        self._tell_move(page, was_resident=False)

    def _tell_move(self, page: CachedPage, was_resident: bool) -> None:
        """From one memory to the other; a file counts as host memory."""
        self._tell(PageRemoved(page.key, was_resident))
        self._tell(page.news)

    def _forget_copies(self, page: CachedPage) -> None:
        size, page.copies = page.copied_bytes, []
        self.host_bytes -= size

    def clear(self) -> None:
        """Forget every page: the model has changed."""
        for page in list(self._pages.values()):
            del self._pages[page.key]
            self._unlist(page, quietly=True)
        self._tell(AllRemoved())

    def _unlist(self, page: CachedPage, quietly: bool = False) -> None:
        """It cannot be found any more; its pages are free once the sequences that share them leave."""
        page.listed = False
        for unused in self._unused:
            unused.pop(page, None)
        self.drop_state(page)
        page.edge = page.parent = page.stored = None
        self._forget_copies(page)
        for group, number in zip(self.groups, page.pages, strict=bool(page.pages)):
            group.give_back([number])
        if not quietly:
            self._tell(PageRemoved(page.key, page.resident))

    def state_of(self, page: CachedPage) -> SlotContents | None:
        """Recurrent state after the page's last row, if it is there."""
        if page.state is None and page.stored is not None:
            return page.stored.state()
        return page.state

    def keep_state(self, page: CachedPage, state: SlotContents, parts: bool = False) -> None:
        """Keep the recurrent state after the page's last row. `parts`: several texts are known to go on from there.

        Where there are too many states, one is dropped. A state where texts part is spared, as long as such states are
        at most four fifths. Of the rest the state is dropped that saves least: the tokens that would be read again,
        back to the state before it, divided by its age. So the ends of conversations outlive earlier points of them.
        """
        self._moment += 1
        page.state, page.moment, page.parts = state, self._moment, page.parts or parts
        self._stateful[page] = None
        while len(self._stateful) > self.most_states:
            parting = [page for page in self._stateful if page.parts]
            many = len(parting) > FOUND_SHARE * self.most_states
            leaving = parting if many else [page for page in self._stateful if not page.parts]
            self.drop_state(min(leaving, key=self._worth))

    def _worth(self, page: CachedPage) -> float:
        """Of a state: tokens that it saves by its age."""
        count, before = 1, page.parent
        while before is not None and before.state is None and count * self.page < MOST_SAVED:
            count, before = count + 1, before.parent
        return count / (self._moment + 1 - page.moment)

    def drop_state(self, page: CachedPage) -> None:
        """Its state is not worth its memory any more."""
        page.state = None
        self._stateful.pop(page, None)

    def held(self, number: int) -> list[int]:
        """The pages that the index holds in group `number`."""
        return [page.pages[number] for page in self._pages.values() if page.resident]

    def recount(self, chains: Iterable[PageChain]) -> None:
        """An interruption left counts of users wrong: count them anew."""
        listed = set(self._pages.values())
        for page in listed:
            page.users, page.listed = 0, True
        for chain in chains:
            for page in chain.used:
                page.users += 1
        for page in [page for page in listed if not page.resident and not page.copies and page.stored is None]:
            listed.remove(page)
            del self._pages[page.key]
            self._tell(PageRemoved(page.key))
        for page in listed:
            if page.resident:
                page.copies = []
        self.host_bytes = sum(page.copied_bytes for page in listed)
        for unused in self._unused:
            for page in [one for one in unused if one not in listed or one.users or self._place(one) is not unused]:
                del unused[page]
        for page in [page for page in self._stateful if page not in listed or page.state is None]:
            self.drop_state(page)
        for page in self._pages.values():
            if not page.users:
                self._place(page).setdefault(page, None)

    def check(self, chains: Iterable[PageChain]) -> None:
        """Users are counted rightly, and a page is idle exactly when it has none."""
        users = dict.fromkeys(self._pages.values(), 0)
        for chain in chains:
            for page in chain.used:
                if page.listed:
                    users[page] += 1
        assert all(page.listed and page.users == count for page, count in users.items()), "users are miscounted"
        unused = {page for page, count in users.items() if not count}
        idle = {page for page in unused if page.resident}
        assert set(self._away) == {page for page in unused - idle if page.copies}, "copies in memory are miscounted"
        assert set(self._filed) == unused - idle - set(self._away), "pages in the file are miscounted"
        assert all(page.stored is not None for page in self._filed), "a page is nowhere"
        assert self.host_bytes == sum(page.copied_bytes for page in users), "copies in host memory are miscounted"
        assert idle == {*self._once, *self._again} and self.idle == len(idle), "idle pages are miscounted"
        stateful = {page for page in users if page.state is not None}
        assert stateful == set(self._stateful) and len(stateful) <= self.most_states, "states are miscounted"
