"""Constraints in an engine: the same tokens with and without drafts, whoever drafts; faults; rows nobody reaches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from engines import VOCAB, NoText, Scripted, decoder, engine, finish, request, run
from heads import HeadShape, mtp_engine, random_head, say_logits, write_head
from rules import Breaking, ByRule, Rule, random_rule
from test_sample_acceptance import fits
from tiny import tiny_model

from forerun.draft.arms import FORCED
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.sample.choose import probabilities
from forerun.sample.history import TokenHistory
from forerun.sample.masks import packed
from forerun.sample.parameters import SamplingParams
from forerun.sample.row import Row

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
DRAFTS = ("off", "lookup", "model", "mtp", "auto")
PROMPT = [7, 8, 9, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("dense"), "llama", **SMALL)


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return decoder(folder, quantize=True)


@pytest.fixture
def machine(folder: Path, target: Decoder, tmp_path: Path) -> Engine:
    """The model drafts for itself too, so that many drafts are right and legal, and many right and illegal."""
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    write_head(tmp_path, folder, shape, random_head(shape))
    return mtp_engine(target, tmp_path, draft_model=target)


def answers(machine: Engine, *wishes: tuple[Any, Rule | None]) -> list[Sequence]:
    found = [machine.submit(wish, NoText(), None if rule is None else ByRule(rule, VOCAB)) for wish, rule in wishes]
    finish(machine, found)
    for one in found:
        assert one.error is None and not one.warnings, (one.error, one.warnings)
        machine.release(one)
    machine.pool.check([])
    return found


def test_every_drafter_gives_the_tokens_of_plain_decoding_alone_and_together(machine: Engine) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.2, "top_p": 0.9, "seed": 6},
    ]
    settings.append({"repetition_penalty": 1.3, "logit_bias": {17: 3.0}})
    wishes, expected = [], []
    for number, (draft, options) in enumerate(product(DRAFTS, settings)):
        rule = random_rule(number % 4, VOCAB) if number % 3 else None
        (plain,) = answers(machine, (request(PROMPT, max_tokens=30, **options), rule))
        wish = request(PROMPT, max_tokens=30, draft=draft, **options)
        (alone,) = answers(machine, (wish, rule))
        assert alone.answer == plain.answer, (draft, options)
        wishes.append((wish, rule))
        expected.append(plain.answer)
        if rule is not None:
            assert all(token in rule(tuple(plain.answer[:n])) for n, token in enumerate(plain.answer))
    together = answers(machine, *wishes)
    assert [one.answer for one in together] == expected
    accepted = sum(one.counters.accepted for one, (_, rule) in zip(together, wishes, strict=True) if rule)
    assert accepted > 50


def test_forced_tokens_are_drafts_but_not_of_those_who_draft_nothing(machine: Engine) -> None:
    text = [20 + n for n in range(60)]
    rule = lambda answer: [text[len(answer)]] if len(answer) % 20 < 12 else range(4, VOCAB)  # noqa: E731
    plain, looked_up, auto = answers(
        machine, *((request(PROMPT, max_tokens=60, draft=draft), rule) for draft in ("off", "lookup", "auto"))
    )
    assert plain.answer == looked_up.answer == auto.answer
    assert plain.counters.drafted == 0
    use = looked_up.counters.arms[FORCED.name]
    assert use.drafted == use.accepted > 15 and looked_up.counters.rounds < 45
    (alone,) = answers(machine, (request(PROMPT, max_tokens=60, draft="mtp", draft_tokens=4), rule))
    assert alone.answer == plain.answer and alone.counters.arms[FORCED.name].accepted >= 24


def test_forced_tokens_may_end_the_answer(machine: Engine) -> None:
    rule = lambda answer: [30 + len(answer)] if len(answer) < 6 else [2]  # noqa: E731
    wish = request(PROMPT, draft="lookup", draft_tokens=10, stop_ids=frozenset({2}))
    (one,) = answers(machine, (wish, rule))
    assert (one.answer, one.finish_reason, one.counters.rounds) == ([30, 31, 32, 33, 34, 35], "stop", 1)


def test_illegal_drafts_count_as_wrong_and_are_never_run(target: Decoder) -> None:
    machine = engine(target)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [5] * depth)
    rule = lambda answer: range(10, 40)  # noqa: E731
    plain, drafted = answers(machine, *((request(PROMPT, draft=draft), rule) for draft in ("off", "lookup")))
    assert plain.answer == drafted.answer
    counters = drafted.counters
    assert counters.accepted == 0 and counters.drafted == counters.rounds - 1  # the last one has no room for drafts


@pytest.mark.parametrize("draft", ["lookup", "auto"])
@pytest.mark.parametrize("method", ["legal", "masks", "forced", "commit"])
def test_a_constraint_that_raises_ends_its_own_answer(machine: Engine, method: str, draft: str) -> None:
    rule, free = random_rule(3, VOCAB), request(PROMPT, draft="model", max_tokens=20)
    wish = request(PROMPT, draft=draft, max_tokens=20)
    expected = [one.answer for one in answers(machine, (wish, rule), (free, None), (free, rule))]
    for spared in (0, 3):
        broken = Breaking(rule, VOCAB, method, spared)
        mine = machine.submit(wish, NoText(), broken)
        others = [machine.submit(free, NoText()), machine.submit(free, NoText(), ByRule(rule, VOCAB))]
        finish(machine, [mine, *others])
        assert [one.answer for one in others] == expected[1:]
        if broken.spared < 0 and method != "forced":
            assert mine.error is broken.error and mine.finish_reason == "error"
        assert mine.answer == expected[0][: len(mine.answer)]
        for one in (mine, *others):
            machine.release(one)
    machine.pool.check([])


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_a_row_that_is_not_reached_may_have_nothing_to_choose_from(target: Decoder, accept: str) -> None:
    """Plain decoding would never have seen it."""
    machine = engine(target)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [11, 12, 13][:depth])
    rule: Rule = lambda answer: [9] if answer[-1:] == (11,) else [10, 11]  # noqa: E731 - and 9 is suppressed
    options: dict[str, Any] = {"suppress": frozenset({9}), "logit_bias": {10: 50.0}, "accept": accept}
    (one,) = answers(machine, (request(PROMPT, draft="lookup", draft_tokens=3, max_tokens=12, **options), rule))
    assert one.answer == [10] * 12
    options["logit_bias"] = {11: 50.0}
    mine = machine.submit(request(PROMPT, draft="lookup", **options), NoText(), ByRule(rule, VOCAB))
    finish(machine, [mine])
    assert mine.answer == [11] and isinstance(mine.error, ForerunError)
    machine.release(mine)


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_tokens_before_a_row_with_nothing_to_choose_from_are_emitted(target: Decoder, accept: str) -> None:
    """As plain decoding does before it fails."""
    machine = engine(target)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [11, 12, 13][:depth])
    rule: Rule = lambda answer: [9] if answer[-1:] == (12,) else [10 + len(answer)]  # noqa: E731 - and 9 is suppressed
    options: dict[str, Any] = {"suppress": frozenset({9}), "accept": accept}
    found = []
    for draft in ("off", "lookup"):
        one = machine.submit(request(PROMPT, draft=draft, **options), NoText(), ByRule(rule, VOCAB))
        finish(machine, [one])
        found.append((one.answer, str(one.error)))
        machine.release(one)
    assert found[0] == found[1] and found[0][0] == [10, 11, 12]


def exact(model: Decoder, rule: Rule, length: int, settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of every answer of `length` tokens."""
    params = SamplingParams(**settings)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for answer, p in found.items():
            logits = say_logits(model, [*PROMPT, *answer])
            row = Row(params, TokenHistory(PROMPT), answer, 5 + len(answer), packed(rule(answer), VOCAB))
            q = probabilities(logits[-1:], [row], VOCAB)[0]
            longer.update({(*answer, token): p * float(q[token]) for token in q.nonzero()[:, 0].tolist()})
        found = longer
    return found


class Eager(ByRule):
    """What it forces is not all that may come, as when a text can be cut into tokens in several ways."""

    def forced(self, most: int) -> list[int]:
        return [22][:most] if len(self.answer) == 1 else []


@pytest.mark.parametrize("kind", [ByRule, Eager])
def test_rejection_keeps_the_distribution_when_drafts_are_illegal(
    target: Decoder, kind: type[ByRule], tmp_path: Path
) -> None:
    """A draft that was drawn and breaks the rule must be seen to be rejected; who drafts is known before it draws."""
    other = decoder(tiny_model(tmp_path, "llama", seed=1, **SMALL), quantize=True)
    machine = engine(target, draft_model=other)
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "logit_bias": dict.fromkeys((20, 21, 22, 23), 20.0)}
    rule: Rule = lambda answer: [20, 22] if len(answer) % 2 else [21, 22, 23]  # noqa: E731
    seeds, length, counts = 1200, 3, Counter[tuple[int, ...]]()
    wish = partial(request, PROMPT, max_tokens=length, draft="model", draft_tokens=2, accept="rejection", **settings)
    for start in range(0, seeds, 60):
        found = [machine.submit(wish(seed=start + n), NoText(), kind(rule, VOCAB)) for n in range(60)]
        finish(machine, found)
        counts.update(tuple(one.answer) for one in found)
        for one in found:
            machine.release(one)
    expected = exact(target, rule, length, settings)
    assert fits(counts, expected), {answer: (counts[answer], p * seeds) for answer, p in expected.items()}


def test_greedy_rejection_is_plain_decoding(machine: Engine) -> None:
    rule = random_rule(8, VOCAB)
    (plain,) = answers(machine, (request(PROMPT), rule))
    for draft in DRAFTS[1:]:
        (one,) = answers(machine, (request(PROMPT, draft=draft, accept="rejection"), rule))
        assert one.answer == plain.answer, draft


def test_an_answer_is_continued_with_its_constraint(machine: Engine) -> None:
    rule = random_rule(9, VOCAB)
    (whole,) = answers(machine, (request(PROMPT, max_tokens=24), rule))
    one = machine.submit(request(PROMPT, max_tokens=9, draft="model"), NoText(), ByRule(rule, VOCAB))
    finish(machine, [one])
    machine.resume(one, 15)
    finish(machine, [one])
    assert one.answer == whole.answer
    machine.release(one)


def test_free_answers_know_nothing_of_it(machine: Engine) -> None:
    (one,) = run(machine, request(PROMPT, draft="auto"))
    assert FORCED.name not in one.counters.arms


def test_drafts_that_a_rule_forbids_do_not_speak_against_their_drafter(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model drafts for itself and is right but for the rule: nobody is told that it does not belong to itself."""
    monkeypatch.setattr("forerun.engine.drafters.ROUNDS", 10)
    machine = engine(target, draft_model=target)
    (free,) = answers(machine, (request(PROMPT), None))
    banned = set(free.answer)
    (bound,) = answers(
        machine, (request(PROMPT, draft="model", draft_tokens=2), lambda _: [t for t in range(40) if t not in banned])
    )
    assert bound.counters.drafted > 20 and not machine.low_acceptance.warnings
