"""Stop strings: the same result however the text is cut, nothing leaks, nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError
from forerun.text.stops import MAX_STOP_LENGTH, MAX_STOPS, StopStrings


def slow_twin(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, read off the whole text: first to be complete, then the earliest start."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    filter_ = StopStrings(stops)
    shown, hit = "", False
    for piece in pieces:
        safe, hit = filter_.push(piece)
        shown += safe
        if hit:
            break
    return shown + filter_.flush(), hit


LETTERS = st.text("ab", min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("abc", max_size=6), max_size=8), st.lists(LETTERS, max_size=4))
@example(["aab", "aaba", "aabx"], ["aabaabx", "bc"])
@example(["aabaaab", "aaax"], ["aabaaax"])
@example(["xab", "c"], ["abc", "xabc", "c"])
def test_same_result_as_on_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == slow_twin("".join(pieces), stops)


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=20), st.lists(LETTERS, min_size=1, max_size=3))
def test_nothing_shown_is_ever_taken_back(text: str, stops: list[str]) -> None:
    """After every character: what is shown is a prefix of the final text, and no more is held than necessary."""
    final, _ = slow_twin(text, stops)
    filter_ = StopStrings(stops)
    shown = ""
    for count, character in enumerate(text, start=1):
        safe, hit = filter_.push(character)
        shown += safe
        assert final.startswith(shown)
        if hit:
            break
        held = text[len(shown) : count]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces_never_leaks() -> None:
    stops = StopStrings(["<END>"])
    assert stops.push("one <") == ("one ", False)
    assert stops.push("EN") == ("", False)
    assert stops.push("Dx <EN") == ("<ENDx ", False)
    assert stops.push("D> two") == ("", True)
    assert stops.push("three") == ("", True)
    assert stops.flush() == ""


def test_flush_gives_back_what_was_held() -> None:
    stops = StopStrings(["stop"])
    assert stops.push("do not sto") == ("do not ", False)
    assert stops.flush() == "sto"
    assert stops.flush() == ""


def test_without_stops_text_passes_through() -> None:
    assert StopStrings().push("anything") == ("anything", False)


def test_first_complete_wins_then_the_earliest_start() -> None:
    assert run(["say abcdef"], ["bcdef", "cd"]) == ("say ab", True)
    assert run(["say abcd"], ["cd", "bcd"]) == ("say a", True)


@pytest.mark.parametrize(
    "stops", [[""], ["ok", ""], [None], "text", ["x"] * (MAX_STOPS + 1), ["x" * (MAX_STOP_LENGTH + 1)]]
)
def test_bad_stops_are_refused(stops: Any) -> None:
    with pytest.raises(ForerunError) as failure:
        StopStrings(stops)
    assert "\n" not in str(failure.value)


def test_bounds_are_inclusive() -> None:
    longest = "x" * MAX_STOP_LENGTH
    assert run(["y" + longest], [longest] * MAX_STOPS) == ("y", True)
