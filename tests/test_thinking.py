"""Thinking budgets, output behind thinking, least numbers of tokens: exact at every border, under drafts too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from engines import NoText, decoder, engine, finish, request
from rules import ByRule, random_rule
from tiny import tiny_model

from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.sample.building import build_constraint
from forerun.sample.constraint import Constraint
from forerun.sample.limits import Both, MinTokens
from forerun.sample.masks import allows, flags_of
from forerun.sample.thinking import ThinkingConstraint, ThinkingMarks, advance

VOCAB, STOP = 290, 2
OPEN, CLOSE, LINE = 40, 41, 42
ONE = ThinkingMarks((OPEN,), (CLOSE,), (LINE, CLOSE, LINE, LINE), (LINE,))
LONG = ThinkingMarks((50, 51), (60, 60, 61))
STOPS = frozenset({STOP})
PAIR = [70, 71]  # the output in these tests: 70, 71, then the end


def pair(answer: tuple[int, ...]) -> list[int]:
    return [PAIR[len(answer)]] if len(answer) < 2 else [STOP]


def thinking(marks: ThinkingMarks = ONE, **options: Any) -> ThinkingConstraint:
    output = options.pop("output", None)
    return ThinkingConstraint(
        marks, VOCAB, output=None if output is None else ByRule(output, VOCAB), stop_ids=STOPS, **options
    )


def allowed(constraint: Constraint) -> set[int]:
    masks = constraint.masks([])
    return set(range(VOCAB)) if masks is None else set(flags_of(masks[0], VOCAB).nonzero()[0].tolist())


def say(constraint: Constraint, *tokens: int) -> None:
    for token in tokens:
        assert constraint.legal([token]) == 1, token
        constraint.commit(token)


def test_a_budget_ends_thinking_exactly_there() -> None:
    constraint = thinking(opened=True, budget=3)
    say(constraint, 5, 6)
    assert constraint.legal([9, 9]) == 1 and constraint.legal([9, LINE, CLOSE, LINE, LINE, 9, STOP]) == 7
    say(constraint, 7)
    assert constraint.forced(9) == [LINE, CLOSE, LINE, LINE] and allowed(constraint) == {LINE}
    say(constraint, LINE, CLOSE, LINE, LINE)
    assert constraint.masks([1, 2, 3]) is None and constraint.forced(4) == []


def test_a_model_that_ends_it_early_is_left_alone() -> None:
    for marks in (ONE, ThinkingMarks((), (CLOSE,))):
        constraint = thinking(marks, opened=True, budget=3)
        say(constraint, 5, CLOSE, 8, 9, 10, 11)
        assert constraint.masks([]) is None


def test_thinking_begins_with_its_mark_and_the_budget_is_for_all_of_it() -> None:
    constraint = thinking(opened=False, budget=2)
    say(constraint, 5, 6, 7, OPEN, 8, CLOSE, 9)
    assert allowed(constraint) == set(range(VOCAB))
    say(constraint, OPEN)  # again: CLOSE counted as well, so nothing is left
    assert constraint.forced(2) == [LINE, CLOSE]


def test_no_budget_at_all() -> None:
    constraint = thinking(opened=True, budget=0, output=pair)
    assert constraint.forced(7) == [LINE, CLOSE, LINE, LINE, *PAIR, STOP]
    say(constraint, LINE, CLOSE, LINE, LINE, *PAIR)
    assert allowed(constraint) == {STOP}


def test_output_begins_behind_thinking_which_cannot_be_the_end() -> None:
    constraint = thinking(opened=True, output=pair)
    assert allowed(constraint) == set(range(VOCAB)) - STOPS
    assert constraint.legal([5, 6, STOP]) == 2 and constraint.legal([5, CLOSE, LINE, *PAIR, STOP, 9]) == 6
    say(constraint, 5, *PAIR, CLOSE)  # what was thought is not the output
    assert constraint.forced(4) == [LINE, *PAIR, STOP]
    say(constraint, LINE, *PAIR)
    assert allowed(constraint) == {STOP}


def test_a_model_may_think_first_or_answer_at_once() -> None:
    constraint = thinking(opened=False, output=pair)
    assert allowed(constraint) == {OPEN, PAIR[0]} and constraint.forced(3) == []
    assert constraint.legal([*PAIR, STOP]) == 3 and constraint.legal([OPEN, 5, CLOSE, LINE, *PAIR, STOP]) == 7
    say(constraint, PAIR[0])
    assert allowed(constraint) == {PAIR[1]}  # too late to think
    constraint = thinking(LONG, opened=False, output=pair)
    say(constraint, 50)
    assert allowed(constraint) == {51}
    say(constraint, 51, 60, 60, 60, 61)  # a mark may begin again within itself
    assert allowed(constraint) == {PAIR[0]}


def test_output_that_begins_like_thinking_is_output() -> None:
    constraint = thinking(opened=False, output=lambda answer: [OPEN] if not answer else [STOP])
    say(constraint, OPEN)
    assert allowed(constraint) == {STOP}


def test_a_mark_under_way_at_the_border_is_finished() -> None:
    constraint = thinking(LONG, opened=True, budget=3)
    say(constraint, 5, 60, 60)
    assert constraint.forced(3) == [61]
    constraint = thinking(LONG, opened=True, budget=3)
    say(constraint, 5, 60, 7)
    assert constraint.forced(3) == [60, 60, 61]


def test_least_number_of_tokens() -> None:
    constraint = MinTokens(2, STOPS, VOCAB)
    assert constraint.legal([STOP]) == 0 and constraint.legal([5, 6, STOP]) == 3 and constraint.legal([5, STOP]) == 1
    masks = constraint.masks([5, 6, 7])
    assert masks is not None and [allows(row, STOP) for row in masks] == [False, False, True, True]
    say(constraint, 5, 6)
    assert constraint.masks([1]) is None


def test_a_grammar_that_is_complete_ends_before_the_least_number_of_tokens() -> None:
    constraint = Both(ByRule(pair, VOCAB), MinTokens(9, STOPS, VOCAB))
    say(constraint, *PAIR)
    assert allowed(constraint) == {STOP}


def test_following_drafts_is_the_same_as_committing_them() -> None:
    """The law of every constraint: row n of the masks is the first row after n commits."""
    dice = random.Random(4)
    marks = [ONE, LONG, ThinkingMarks((), (CLOSE,))]
    for _ in range(60):
        options: dict[str, Any] = {
            "opened": dice.random() < 0.5,
            "budget": dice.choice([None, 0, 1, 3, 6]),
            "output": dice.choice([None, pair, random_rule(dice.randrange(9), VOCAB, first=30)]),
        }
        mark, least, before = dice.choice(marks), dice.choice([0, 4]), list[int]()
        make: Callable[[], Constraint] = lambda: Both(thinking(mark, **options), MinTokens(least, STOPS, VOCAB))  # noqa: B023, E731
        constraint = make()
        for _ in range(12):
            choices = sorted(allowed(constraint) - STOPS)
            likely = [token for token in (OPEN, CLOSE, 50, 51, 60, 61) if token in choices]
            if not choices:
                break
            before.append(dice.choice(likely if likely and dice.random() < 0.6 else choices))
            constraint.commit(before[-1])
        for start in range(len(before)):
            drafts, here, there = before[start : start + 5], make(), make()
            say(here, *before[:start])
            say(there, *before[:start])
            assert here.legal(drafts) == len(drafts)
            masks = here.masks(drafts)
            for place in range(len(drafts) + 1):
                row = set(range(VOCAB)) if masks is None else set(flags_of(masks[place], VOCAB).nonzero()[0].tolist())
                assert row == allowed(there), (options, mark, before, start, place)
                illegal = sorted(set(range(VOCAB)) - row)
                if illegal:
                    assert here.legal([*drafts[:place], dice.choice(illegal)]) == place
                if place < len(drafts):
                    there.commit(drafts[place])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    model = decoder(tiny_model(tmp_path_factory.mktemp("tiny"), "llama", **shape), quantize=True)
    return engine(model, draft_model=model)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_under_speculation(machine: Engine, temperature: float) -> None:
    for budget in (0, 1, 2, 5):
        found = []
        for draft in ("off", "lookup", "model", "auto"):
            settings: dict[str, Any] = {"temperature": temperature, "seed": budget, "logit_bias": {CLOSE: -50.0}}
            wish = request([7, 8, 7], draft=draft, stop_ids=STOPS, max_tokens=30, **settings)
            options: dict[str, Any] = {"thinking_open": True, "think_end_ids": [CLOSE], "closing_ids": [LINE, CLOSE]}
            constraint = build_constraint(VOCAB, STOPS, budget=budget, min_tokens=30, **options)
            found.append(machine.submit(wish, NoText(), constraint))
        finish(machine, found)
        (plain, *others) = [one.answer for one in found]
        assert all(other == plain for other in others), budget
        assert plain[budget : budget + 2] == [LINE, CLOSE] and CLOSE not in plain[:budget] and len(plain) == 30
        for one in found:
            assert one.error is None
            machine.release(one)


def test_what_a_request_asks_for_becomes_one_constraint() -> None:
    assert build_constraint(VOCAB, STOPS) is None
    assert build_constraint(VOCAB, STOPS, thinking_open=True, think_end_ids=[CLOSE]) is None
    assert build_constraint(VOCAB, frozenset(), min_tokens=5) is None
    assert isinstance(build_constraint(VOCAB, STOPS, min_tokens=5), MinTokens)
    assert build_constraint(VOCAB, STOPS, think_end_ids=[CLOSE], budget=5) is None  # it does not think
    with pytest.raises(ForerunError, match="budget"):
        build_constraint(VOCAB, STOPS, budget=-1, think_end_ids=[CLOSE])
    with pytest.raises(ForerunError, match="does not mark"):
        build_constraint(VOCAB, STOPS, budget=1)
    with pytest.raises(ForerunError, match="min tokens"):
        build_constraint(VOCAB, STOPS, min_tokens=-1)


def test_marks_that_repeat_themselves() -> None:
    mark, text = (1, 1, 2), [1, 1, 1, 2, 1, 3, 1, 1, 2]
    matched, found = 0, []
    for token in text:
        matched = advance(mark, matched % len(mark) if matched == len(mark) else matched, token)
        found.append(matched)
    assert found == [1, 2, 2, 3, 1, 0, 1, 2, 3]
