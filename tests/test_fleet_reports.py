"""Routers learn from caches which replica has what, also where reports are late, lost or of an engine that is new."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engines import PAGE, decoder, engine, request, run
from tiny import tiny_model

from forerun.cache.prefix import AllRemoved, CachedPage, PageRemoved, PageStored
from forerun.fleet import cache_diary
from forerun.fleet.cache_diary import CacheDiary
from forerun.fleet.routing import BLOCK, BLOCKS, LATE, ByPrefix, CacheReport, Prefixes, Route, chain_of

TEXT = [random.Random(0).randrange(1000) for _ in range(6 * BLOCK + 5)]
CHAIN = chain_of(TEXT)


def pages(tokens: list[int], size: int, salt: str = "") -> list[PageStored]:
    """Of a text, as the index publishes them."""
    names = [f"{salt} {tokens[: (n + 1) * size]}".encode() for n in range(len(tokens) // size)]
    parents = [None, *names]
    return [
        PageStored(name, parents[n], tuple(tokens[n * size : (n + 1) * size])) for n, name in enumerate(names)
    ]  # fmt: skip


def whole(diary: CacheDiary) -> set[int]:
    """All blocks it has; most reports are not whole."""
    while True:
        report = diary.report()
        if report.whole:
            assert len(set(report.changes)) == len(report.changes)
            return set(report.changes)


@pytest.mark.parametrize("size", [8, 48, 64, 100, 128])
def test_pages_of_any_size_are_blocks_of_prompts(size: int) -> None:
    diary, stored = CacheDiary(), pages(TEXT, size)
    for count, page in enumerate(stored, 1):
        diary.hear(page)
        assert whole(diary) == set(chain_of(TEXT[: count * size]))
    for count, page in reversed(list(enumerate(stored))):
        diary.hear(PageRemoved(page.key))
        assert whole(diary) == set(chain_of(TEXT[: count * size]))


def test_a_block_is_there_as_long_as_any_page_with_its_text() -> None:
    """Requests with other salts, or with a picture, have pages of their own for the same tokens."""
    diary, mine, other = CacheDiary(), pages(TEXT, 64, "mine"), pages(TEXT, 64, "other")
    for page in (*mine, *other):
        diary.hear(page)
    for page in mine:
        diary.hear(PageRemoved(page.key))
    assert whole(diary) == set(CHAIN)
    diary.hear(PageRemoved(other[-1].key))
    assert whole(diary) == set(CHAIN[:-1])


def test_only_what_routers_look_at_is_reported() -> None:
    diary = CacheDiary()
    tokens = [7] * BLOCK * (BLOCKS + 3)
    for page in pages(tokens, BLOCK * 103):
        diary.hear(page)
    assert whole(diary) == set(chain_of(tokens)) and len(whole(diary)) == BLOCKS


def test_a_real_engine_reports_what_it_has(tmp_path: Path) -> None:
    target = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    small = engine(target, pages=40)
    index, diary = small.pool.prefix, CacheDiary()
    index.listen(diary.hear)

    def text(page: CachedPage | None) -> tuple[int, ...]:
        return () if page is None else text(page.parent) + page.tokens

    seen: set[int] = set()
    for number in range(12):
        run(small, request([number % 5 + 3, *range(20, 20 + 130 + number)], max_tokens=20))
        here = {block for page in index._pages.values() for block in chain_of(text(page))}
        assert whole(diary) == here and len(index) <= 40
        seen |= here
    assert len(seen) > len(here) >= BLOCK // PAGE // 4, "some had to go"
    index.clear()
    assert whole(diary) == set()


class Clock:
    """Stands still until it is told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(prefixes: Prefixes[str], replica: str) -> set[int]:
    """Blocks that a router believes to be there for good."""
    return prefixes._told(replica)


def test_reports_may_be_lost_late_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a whole report a router knows all; without a gap it always does; it never believes what it could know."""
    monkeypatch.setattr(cache_diary, "LATEST", 16)
    dice = random.Random(3)
    texts = [[dice.randrange(3) for _ in range(BLOCK)] * 8 for _ in range(12)]
    diary, prefixes, heard, complete, checked = CacheDiary(), Prefixes[str](), 0, False, 0
    there: dict[bytes, PageStored] = {}
    for _ in range(3000):
        if dice.random() < 0.002:
            diary.hear(AllRemoved())
            there.clear()
        elif there and dice.random() < 0.5:
            page = there.pop(dice.choice([key for key in there if all(key != one.parent for one in there.values())]))
            diary.hear(PageRemoved(page.key))
        else:
            new = [page for page in pages(dice.choice(texts), BLOCK) if page.key not in there][:1]
            for page in new:
                there[page.key] = page
                diary.hear(page)
        if dice.random() < 0.3:
            report = diary.report()
            if dice.random() < 0.7:
                same_life = report.life == getattr(prefixes._latest.get("a"), "life", None)
                missed = report.number - (heard if same_life else 0)
                complete = report.whole or ((complete or not same_life) and missed <= len(report.changes))
                for _ in range(dice.randrange(1, 3)):
                    prefixes.reported("a", report)
                heard = report.number
                if complete:
                    checked += 1
                    assert told(prefixes, "a") == set(diary._blocks)
                assert told(prefixes, "a") <= set(diary._blocks)
    assert checked > 300


def test_a_replica_that_starts_again_has_nothing() -> None:
    """Under the same name: what the one before had is gone, whatever it was sent."""
    chooser: ByPrefix[str] = ByPrefix(seed=0)
    route, queues = Route(CHAIN, session="x"), {"a": 0, "b": 0, "c": 0}
    diary = CacheDiary()
    for page in pages(TEXT, 64):
        diary.hear(page)
    home = chooser.choose(route, dict(queues))
    other = next(name for name in queues if name != home)
    chooser.prefixes.reported(other, diary.report())
    chooser.sent(route, other)
    assert chooser.choose(route, dict(queues)) == other
    again = CacheDiary()
    chooser.prefixes.reported(other, again.report())
    assert chooser.choose(route, dict(queues)) == home and not chooser.prefixes._places
    for page in pages(TEXT, 64)[:2]:
        again.hear(page)
    chooser.prefixes.reported(other, again.report())
    assert chooser.prefixes.longest(CHAIN, queues) == {other} and told(chooser.prefixes, other) == set(CHAIN[:2])


def test_a_replica_that_goes_takes_its_reports_along() -> None:
    prefixes: Prefixes[str] = Prefixes()
    diary = CacheDiary()
    for page in pages(TEXT, 64):
        diary.hear(page)
    report = diary.report()
    prefixes.reported("a", report)
    prefixes.sent("b", CHAIN[:1])
    prefixes.keep(["b"])
    assert prefixes.longest(CHAIN, ["a", "b"]) == {"b"}
    prefixes.reported("a", report)
    assert prefixes.longest(CHAIN, ["a", "b"]) == {"a"}, "it is new"


def test_what_was_sent_counts_until_the_cache_has_had_time_to_say_so() -> None:
    clock = Clock()
    prefixes: Prefixes[str] = Prefixes(clock=clock)
    names = ["silent", "telling"]
    for name in names:
        prefixes.sent(name, CHAIN[:2])
    diary = CacheDiary()
    prefixes.reported("telling", diary.report())
    assert prefixes.longest(CHAIN, names) == {"silent", "telling"}, "it may be reading it"
    clock.now += LATE - 1
    prefixes.sent("telling", CHAIN[:3])
    assert prefixes.longest(CHAIN, names) == {"telling"}
    clock.now += LATE
    assert prefixes.longest(CHAIN, names) == {"silent"}, "it had time to say so"
    for page in pages(TEXT, 64)[:4]:
        diary.hear(page)
    prefixes.reported("telling", diary.report())
    clock.now += 100 * LATE
    assert prefixes.longest(CHAIN, names) == {"telling"}
    diary.hear(PageRemoved(pages(TEXT, 64)[3].key))
    prefixes.sent("telling", CHAIN[:3])
    prefixes.reported("telling", diary.report())
    assert told(prefixes, "telling") == set(CHAIN[:3]), "what was sent takes nothing from what was told"


def test_what_a_cache_gave_up_is_asked_for_elsewhere() -> None:
    chooser: ByPrefix[str] = ByPrefix(seed=0)
    diaries = {name: CacheDiary() for name in ("a", "b")}
    for name, count in (("a", 6), ("b", 3)):
        for page in pages(TEXT, 64)[:count]:
            diaries[name].hear(page)
        chooser.prefixes.reported(name, diaries[name].report())
    assert chooser.choose(Route(CHAIN), {"a": 0, "b": 0}) == "a"
    for page in reversed(pages(TEXT, 64)[2:]):
        diaries["a"].hear(PageRemoved(page.key))
    chooser.prefixes.reported("a", diaries["a"].report())
    assert chooser.choose(Route(CHAIN), {"a": 0, "b": 0}) == "b"


def test_reports_change_only_when_something_happens() -> None:
    """Ray sends them on when they do."""
    diary = CacheDiary()
    diary.report()
    assert diary.report() == diary.report() == CacheReport(diary._life, 0, (), False)


def test_few_blocks_are_remembered() -> None:
    prefixes: Prefixes[str] = Prefixes(most=10)
    prefixes.reported("a", CacheReport("life", 100, tuple(range(100)), True))
    assert len(prefixes._places) == 10 == len(told(prefixes, "a"))
    prefixes.reported("a", CacheReport("life", 101, (~5, ~95), False))
    assert len(prefixes._places) == 9
