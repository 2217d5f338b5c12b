"""The prefix cache without a model: whatever sequences do, every page they hold has the text they think it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from engines import CPU
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from forerun.cache.chain import Found, PageChain
from forerun.cache.groups import HOLE, PageGroup
from forerun.cache.pages import PagePool, SequenceCache
from forerun.cache.prefix import AllRemoved, CachedPage, PageEvent, PageRemoved, PageStored
from forerun.cache.prefix_file import PrefixFacts, PrefixFile
from forerun.cache.recurrent import SlotContents
from forerun.kernels.interface import AttentionSpec, HeadLayout

PAGE, PAGES = 4, 24
SPECS = [AttentionSpec(HeadLayout(1, 1, 2)), AttentionSpec(HeadLayout(1, 1, 2), window=5)]


def small_pool(*specs: AttentionSpec, host: int = 0) -> PagePool:
    """`host`: pages that host memory holds."""
    pool = PagePool(specs or SPECS, PAGES, PAGE, torch.float32, CPU)
    pool.prefix.serve(any_row=True, chunk=1, host_limit=host * sum(page_bytes(group) for group in pool.groups))
    return pool


def page_bytes(group: PageGroup) -> int:
    return sum(tensor.nbytes for tensor in group.copy([0]))


class Text:
    """A sequence that writes its tokens where a model would write keys."""

    def __init__(self, pool: PagePool, tokens: list[int], salt: bytes = b"", media: tuple[bytes, ...] = ()) -> None:
        self.pool, self.tokens, self.cache = pool, list(tokens), SequenceCache(pool)
        self.chain = self.cache.chain = PageChain(pool.prefix, self.tokens, len(tokens), salt, media)
        found = self.chain.look_up()
        self.chain.take(found)
        if sum(not page.resident for page in found.pages) > pool.free:  # as the scheduler does: it has to wait
            self.chain.release()
            found = Found([], 0)
        self.cache.begin_with(found)
        self.found = self.cache.length

    def read(self, count: int) -> None:
        """The next tokens of it, in one pass."""
        start, stop = self.cache.length, min(self.cache.length + count, len(self.tokens))
        self.cache.grow(stop)
        for group, held in zip(self.pool.groups, self.cache.blocks, strict=True):
            for at in range(start, stop):
                group.layers[0].keys[held[at // PAGE], 0, 0, at % PAGE] = self.tokens[at]
        features = torch.tensor(self.tokens[start:stop]).float()[:, None]
        self.cache.commit(stop - start, features)

    def say(self, *tokens: int) -> None:
        self.tokens += tokens
        self.read(len(tokens))

    def check(self) -> None:
        """What a row at the end would see is there, in the tables that passes read."""
        length = self.cache.length
        for group, held, table in zip(self.pool.groups, self.cache.blocks, self.cache.tables, strict=True):
            assert table.tolist() == held
            for at in range(group.first_needed(length) * PAGE, length if held else 0):
                assert held[at // PAGE] != HOLE
                assert group.layers[0].keys[held[at // PAGE], 0, 0, at % PAGE] == self.tokens[at]


class Texts(RuleBasedStateMachine):
    """Texts of few different tokens, so that many begin alike."""

    texts = Bundle("texts")

    @initialize(windows=st.sampled_from(["some", "all", "none"]), host=st.sampled_from([0, 5, 50]))
    def begin(self, windows: str, host: int) -> None:
        self.specs, self.host = {"some": SPECS, "all": SPECS[1:], "none": SPECS[:1]}[windows], host
        self.pool = small_pool(*self.specs, host=host)
        self.live: list[Text] = []
        self.listed: dict[bytes, PageStored] = {}
        self.pool.prefix.listen(self.hear)

    def hear(self, event: PageEvent) -> None:
        if isinstance(event, PageStored):
            assert event.key not in self.listed
            self.listed[event.key] = event
        elif isinstance(event, PageRemoved):
            assert self.listed.pop(event.key).resident == event.resident
        else:
            assert event == AllRemoved()
            self.listed.clear()

    def fits(self, tokens: int) -> bool:
        return self.pool.pages_for(tokens) <= self.pool.free

    @rule(count=st.integers(1, PAGES))
    def make_free(self, count: int) -> None:
        self.pool.prefix.make_free(count)

    @rule(target=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40), salt=st.sampled_from([b"", b"s"]))
    def start(self, tokens: list[int], salt: bytes) -> Text:
        text = Text(self.pool, tokens, salt)
        self.live.append(text)
        assert text.found <= len(tokens) - 1
        return text

    @rule(text=texts, count=st.integers(1, 40))
    def read(self, text: Text, count: int) -> None:
        if text in self.live and text.cache.parked is None and self.fits(text.cache.missing(len(text.tokens)) * PAGE):
            text.read(count)

    @rule(text=texts, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def say(self, text: Text, tokens: list[int]) -> None:
        more = len(text.tokens) + len(tokens)
        whole = text in self.live and text.cache.parked is None and text.cache.length == len(text.tokens)
        if whole and self.fits(text.cache.missing(more) * PAGE):
            text.say(*tokens)

    @rule(text=texts)
    def park(self, text: Text) -> None:
        if text in self.live and text.cache.parked is None and text.cache.pages:
            text.cache.park()

    @rule(text=texts)
    def unpark(self, text: Text) -> None:
        if text.cache.parked is not None and text.cache.parked_pages <= self.pool.free:
            text.cache.unpark()

    @rule(text=consumes(texts))
    def leave(self, text: Text) -> None:
        text.cache.release()
        self.live.remove(text)

    @rule()
    def clear(self) -> None:
        self.pool.prefix.clear()

    @precondition(lambda self: not self.live)
    @rule(largest=st.sampled_from([500, 10_000]))
    def run_again(self, largest: int) -> None:
        """As another process, with what this one leaves in a file."""
        with TemporaryDirectory() as folder:
            file = PrefixFile(Path(folder) / "cache", PrefixFacts({}, {}), largest)
            file.write(self.pool)
            self.pool = small_pool(*self.specs, host=self.host)
            self.listed.clear()
            self.pool.prefix.listen(self.hear)
            file.read(self.pool)

    @precondition(lambda self: len(self.live) > 1)
    @rule()
    def miscount(self) -> None:
        """As an interruption leaves it."""
        for page in self.pool.prefix._pages.values():
            page.users += 1
        self.pool.groups[0]._free.clear()
        self.pool.recount([text.cache for text in self.live])

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([text.cache for text in self.live])
        assert self.listed == {key: page.news for key, page in self.pool.prefix._pages.items()}
        for text in self.live:
            if text.cache.parked is None:
                text.check()
        if not self.live:
            assert self.pool.free == PAGES
        for page in self.pool.prefix._pages.values():
            if page.stored is not None and not page.resident:
                assert page.stored.contents()[0][0][0, 0, 0].tolist() == list(page.tokens)

    def teardown(self) -> None:
        for text in getattr(self, "live", []):
            text.cache.release()
        if hasattr(self, "pool"):
            self.pool.check([])
            assert self.pool.free == PAGES
            self.pool.prefix.make_free(PAGES)
            assert all(group.free == PAGES for group in self.pool.groups)


Texts.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTexts = Texts.TestCase


def finished(pool: PagePool, tokens: list[int], salt: bytes = b"", media: tuple[bytes, ...] = ()) -> Text:
    text = Text(pool, tokens, salt, media)
    text.read(len(tokens))
    text.check()
    text.cache.release()
    return text


def test_pages_found_again_outlive_pages_of_texts_that_come_once() -> None:
    pool, system = small_pool(), [1] * 20
    finished(pool, [*system, 2])
    assert finished(pool, [*system, 3]).found == 20
    for number in range(200):
        assert finished(pool, [4 + number] * 30).found == 0
    assert finished(pool, [*system, 3]).found == 20
    for number in range(40):  # what is found for a while and never again goes too
        for _ in range(2):
            finished(pool, [1000 + number] * 30)
    assert finished(pool, [*system, 3]).found == 0


def test_of_recurrent_states_those_go_that_save_least_for_their_age() -> None:
    pool = small_pool()
    index, state = pool.prefix, SlotContents([], torch.zeros(0))
    index.most_states = 4
    pages, others = (finished_pages(pool, tokens) for tokens in (range(40), range(50, 70)))

    def kept() -> list[CachedPage]:
        assert len(index._stateful) <= 4
        return [page for page in (*pages, *others) if page.state is not None]

    for page in (pages[4], pages[5], pages[9]):
        index.keep_state(page, state)
    index.keep_state(others[0], state, parts=True)
    assert kept() == [pages[4], pages[5], pages[9], others[0]]
    index.keep_state(others[4], state)  # of five pages' text, new: the one goes behind which nearly nothing is lost
    assert kept() == [pages[4], pages[9], others[0], others[4]]
    for _ in range(2):
        index.begin_behind(pages[4])  # two texts go on from there
    for at in range(6, 9):  # those where texts part stay, however old
        index.keep_state(pages[at], state)
        assert pages[4] in kept() and others[0] in kept() and pages[at] in kept()
    for page in (*pages[:4], *others[1:4]):  # but not all of them, where there are too many
        index.keep_state(page, state, parts=True)
    assert len([page for page in kept() if page.parts]) <= 4 and others[0] not in kept()


def finished_pages(pool: PagePool, tokens: Sequence[int]) -> list[CachedPage]:
    text = Text(pool, list(tokens))
    text.read(len(tokens))
    pages = list(text.chain.pages)
    text.cache.release()
    return pages


def test_one_text_never_fills_the_memory_of_others() -> None:
    pool = small_pool()
    finished(pool, list(range(PAGES * PAGE)))
    assert pool.prefix.idle == PAGES == pool.free and pool.groups[0].free == 0
    assert finished(pool, [7] * PAGES * PAGE).found == 0


def test_other_salts_media_and_beginnings_never_meet() -> None:
    pool, tokens = small_pool(), list(range(16))
    finished(pool, tokens)
    assert finished(pool, tokens, salt=b"mine").found == 0
    assert finished(pool, tokens, media=(b"", b"picture")).found == 4
    assert finished(pool, tokens, media=(b"", b"another")).found == 4
    assert finished(pool, tokens, media=(b"", b"picture")).found == 12
    assert finished(pool, [9, *tokens[1:]]).found == 0
    assert finished(pool, tokens).found == 12 and finished(pool, tokens, salt=b"mine").found == 12


def test_two_texts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = small_pool()
    monkeypatch.setattr("forerun.cache.chain.PageChain.key", lambda self, number: b"%d" % number)
    finished(pool, [1] * 12)
    assert finished(pool, [2] * 12).found == 0
    assert finished(pool, [2] * 12).found == 8


def test_the_last_row_of_a_page_stays_with_it() -> None:
    pool = small_pool()
    finished(pool, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    chain = PageChain(pool.prefix, [5, 6, 7, 8, 9, 10, 11, 12, 13], 9)
    edges = [page.edge for page in chain.look_up().pages]
    assert [None if edge is None else edge.tolist() for edge in edges] == [[8.0], [12.0]]


def test_what_two_have_read_at_once_is_kept_once() -> None:
    pool, tokens = small_pool(), list(range(13))
    one, other = Text(pool, tokens), Text(pool, tokens)
    one.read(13)
    other.read(13)
    assert one.cache.blocks[0][:3] == other.cache.blocks[0][:3] and one.cache.blocks[0][3] != other.cache.blocks[0][3]
    pool.check([one.cache, other.cache])
    one.check()
    other.check()
    one.cache.release()
    other.say(1, 2, 3)
    other.check()


def test_a_new_model_knows_nothing() -> None:
    pool, tokens = small_pool(), list(range(13))
    running = Text(pool, tokens)
    running.read(9)
    pool.prefix.clear()
    running.read(4)
    running.say(1, 2, 3, 4, 5)
    pool.check([running.cache])
    running.cache.release()
    assert finished(pool, tokens).found == 0 and not replace(running.chain).look_up().pages[3:]


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    pool, tokens = small_pool(), list(range(41))
    finished(pool, tokens)
    with_room = PAGES - 10
    pool.prefix.make_free(with_room + 4)
    assert finished(pool, tokens).found == 24


def test_what_came_back_from_host_memory_without_its_beginning_is_not_kept() -> None:
    pool, tokens = small_pool(SPECS[1]), list(range(60))
    text = Text(pool, tokens)
    text.read(50)
    text.cache.park()
    assert pool.free == PAGES
    pool.prefix.clear()
    text.cache.unpark()
    text.read(10)
    text.check()
    assert HOLE in text.cache.pages and not len(pool.prefix)
    pool.check([text.cache])


def test_pages_that_fell_out_of_a_window_are_found_and_are_free_meanwhile() -> None:
    pool, tokens = small_pool(SPECS[1]), list(range(60))
    text = Text(pool, tokens)
    text.read(60)
    assert pool.free > PAGES - 15 and len(pool.prefix) == 15
    again = Text(pool, tokens)
    again.read(1)
    assert again.found == 56 and again.cache.pages.count(HOLE) > 5
    again.check()
    pool.check([text.cache, again.cache])


def test_what_has_to_go_comes_back_from_host_memory() -> None:
    pool, tokens = small_pool(host=30), list(range(60))
    finished(pool, tokens)
    finished(pool, [100] * PAGES * PAGE)
    assert pool.prefix.host_bytes > 0 and finished(pool, tokens).found == 56
    for number in range(30):
        finished(pool, [200 + number] * 80)
    assert 0 < pool.prefix.host_bytes <= pool.prefix.host_limit
    assert finished(pool, tokens).found < 56
    pool.check([])
    pool.prefix.clear()
    assert not pool.prefix.host_bytes and not len(pool.prefix)


def test_what_is_computed_again_needs_no_copy() -> None:
    pool, tokens = small_pool(host=30), list(range(30))
    one = Text(pool, tokens)
    finished(pool, tokens)
    pool.prefix.make_free(PAGES)
    assert pool.prefix.host_bytes
    one.read(30)
    one.check()
    assert not pool.prefix.host_bytes
    pool.check([one.cache])
    one.cache.release()
    assert finished(pool, tokens).found == 28


def test_a_late_listener_hears_what_is_there_and_pages_that_move_say_so() -> None:
    pool = small_pool(SPECS[0], host=50)
    finished(pool, list(range(12)))
    events: list[PageEvent] = []
    pool.prefix.listen(events.append)
    stored = [event for event in events if isinstance(event, PageStored)]
    assert [event.tokens for event in stored] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)] and len(events) == 3
    assert [event.parent for event in stored] == [None, stored[0].key, stored[1].key]
    assert all(event.resident for event in stored)
    events.clear()
    pool.prefix.make_free(PAGES)
    away = [event for event in events if isinstance(event, PageStored)]
    assert {event.key for event in away} == {event.key for event in stored} and len(events) == 6
    assert not any(event.resident for event in away)
    events.clear()
    assert finished(pool, [*range(12), 9]).found == 12
    assert events[:3] == [PageRemoved(event.key, resident=False) for event in stored[:1]] + stored[:1] + [
        PageRemoved(stored[1].key, resident=False)
    ]
