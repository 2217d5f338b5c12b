"""The suffix automaton against a brute-force twin, and the drafter on top of it."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.draft.automaton import NO_MATCH, REFRESHED_STATES, SuffixAutomaton
from forerun.draft.lookup import Lookup
from forerun.draft.protocol import Draft, Drafter, Want
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.sample.row import Row

NO_ROW = cast("Row", None)  # the lookup drafter never looks at it


def want(sequence_id: int, depth: int) -> Want:
    return Want(sequence_id=sequence_id, depth=depth, row=NO_ROW, rejection=False)


def occurrences(text: list[int], length: int) -> list[int]:
    """Slow twin: ends of the earlier occurrences of the last `length` tokens."""
    suffix = text[len(text) - length :]
    return [end for end in range(length - 1, len(text) - 1) if text[end - length + 1 : end + 1] == suffix]


def longest_repeated_suffix(text: list[int]) -> int:
    return next((length for length in range(len(text) - 1, 0, -1) if occurrences(text, length)), 0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=50)))
def test_match_is_the_longest_repeated_suffix_and_its_place_is_real(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.extend(token)
        seen = text[:count]
        expected = longest_repeated_suffix(seen)
        assert automaton.match.length == expected
        if expected:
            assert automaton.match.end in occurrences(seen, expected)
        else:
            assert automaton.match == NO_MATCH


def test_match_is_the_most_recent_occurrence_where_chains_are_short() -> None:
    source = random.Random(3)
    text = [source.randrange(6) for _ in range(400)]
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.extend(token)
        length, end = automaton.match
        assert length < REFRESHED_STATES  # so no chain can be longer than what is refreshed
        if length:
            assert end == occurrences(text[:count], length)[-1]


@pytest.mark.parametrize("kind", ["random", "small vocabulary", "one token", "period", "fibonacci"])
def test_100k_tokens_extend_quickly_and_stay_small(kind: str) -> None:
    source = random.Random(1)
    count = 100_000
    fibonacci = [[0], [0, 1]]
    while len(fibonacci[-1]) < count:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    text = {
        "random": [source.randrange(50_000) for _ in range(count)],
        "small vocabulary": [source.randrange(3) for _ in range(count)],
        "one token": [5] * count,
        "period": list(range(100)) * (count // 100),
        "fibonacci": fibonacci[-1][:count],
    }[kind]
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 1.0:  # again only when a busy machine spoilt the figure
        start = time.process_time()
        automaton = SuffixAutomaton(text)
        seconds.append(time.process_time() - start)
        assert len(automaton) == count
        assert len(automaton._length) <= 2 * count
    assert min(seconds) < 1.0


def test_lookup_is_a_drafter_with_deterministic_drafts() -> None:
    lookup: Drafter = Lookup()
    lookup.open(1, [1, 2, 3, 4, 9, 1, 2])
    assert lookup.name == "lookup"
    assert lookup.propose([want(1, 2)]) == [Draft([3, 4], None)]


def test_observed_tokens_count_and_sequences_are_apart() -> None:
    lookup = Lookup()
    lookup.open(1, [1, 2, 3])
    lookup.open(2, [7, 8, 7])
    lookup.observe(1, [4, 1])
    lookup.observe(1, [2])
    assert lookup.propose([want(2, 3), want(1, 3)]) == [Draft([]), Draft([3, 4, 1])]
    assert lookup.propose([want(1, 3)]) == [Draft([3, 4, 1])]  # asking twice adds nothing to the text
    lookup.observe(2, [8])
    assert lookup.propose([want(2, 4)]) == [Draft([7, 8, 7, 8])]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_is_drafted_to_full_depth(period: int) -> None:
    text = [40, 41, *(list(range(period)) * 20)][: 2 + 4 * period]
    lookup = Lookup()
    lookup.open(0, text)
    assert lookup.draft(0, 17) == (list(range(period)) * 20)[:17]


def test_no_draft_without_a_long_enough_match() -> None:
    text = [1, 2, 3, 1]
    for minimum, expected in ((1, [2, 3]), (2, [])):
        lookup = Lookup(minimum_match=minimum)
        lookup.open(0, text)
        assert lookup.draft(0, 2) == expected
    lookup.open(3, [])
    assert lookup.draft(3, 4) == []
    lookup.open(4, [1, 2, 1, 2])
    assert lookup.draft(4, 0) == []


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    lookup = Lookup()
    lookup.open(0, [1, 2, 3, 50, 9, 2, 3, 60, 8, 1, 2, 3])
    assert lookup.draft(0, 1) == [50]


def test_of_equal_matches_the_most_recent_wins() -> None:
    lookup = Lookup()
    lookup.open(0, [1, 2, 50, 9, 1, 2, 60, 8, 1, 2])
    assert lookup.draft(0, 1) == [60]


def test_closing_forgets() -> None:
    lookup = Lookup()
    lookup.open(0, [1, 2, 1, 2])
    lookup.close(0)
    lookup.close(0)
    with pytest.raises(KeyError):
        lookup.propose([want(0, 1)])
    lookup.open(0, [5])
    assert lookup.draft(0, 3) == []


@pytest.mark.parametrize("minimum", [0, -1])
def test_a_minimum_below_one_is_refused(minimum: Any) -> None:
    with pytest.raises(ForerunError, match="at least 1"):
        Lookup(minimum_match=minimum)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(1, 12))
def test_a_draft_continues_an_earlier_occurrence(text: list[int], depth: int) -> None:
    lookup = Lookup(minimum_match=1)
    lookup.open(0, text)
    drafted = lookup.draft(0, depth)
    length = longest_repeated_suffix(text)
    if not length:
        assert drafted == []
        return
    whole = text + drafted
    assert len(drafted) == depth
    assert any(whole[end + 1 : end + 1 + depth] == drafted for end in occurrences(text, length))


def test_ready_counts_tokens_that_are_not_indexed_yet() -> None:
    lookup = Lookup()
    lookup.open(7, [1, 2, 3, 4])
    lookup.observe(7, [9])
    assert lookup.ready(7) == 0
    lookup.observe(7, [1, 2, 3])
    assert lookup.ready(7) == 3
    lookup.observe(7, [8])
    assert lookup.ready(7) == 0  # and not what matched before
