"""`auto` in an engine: the same tokens whatever it decides, arms that share a drafter, batches, rejection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK, VOCAB, Scripted, decoder, engine, request, run
from heads import joint
from test_sample_acceptance import chi_square, fits
from tiny import tiny_model

import forerun
from forerun.draft.arms import LONG_LOOKUP
from forerun.engine.drafters import Drafters
from forerun.engine.engine import Engine
from forerun.engine.plan import Turn
from forerun.engine.sequence import Sequence
from forerun.models.layers.decoder import Decoder
from forerun.policy.costs import RoundShape
from forerun.policy.decision import PLAIN, Decision
from forerun.policy.policy import Policy
from forerun.policy.records import Ask

LOOP = [5, 6, 7, 8, 9, 10, 11, 12]
FAVOURITES = {20: 9.0, 21: 9.0}  # a random model repeats itself when it samples from few


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("target"), "llama"), quantize=True)


@pytest.fixture
def machine(target: Decoder) -> Engine:
    return engine(target, draft_model=target)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Decision]]]:
    """The decisions of every round, as they are run."""
    seen: list[list[Decision]] = []
    propose = Drafters.propose

    def spy(drafters: Drafters, turns: list[Turn]) -> list[Turn]:
        generating = [turn.decision for turn in turns if not turn.is_prompt]
        if generating:
            seen.append(generating)
        return propose(drafters, turns)

    monkeypatch.setattr(Drafters, "propose", spy)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whatever_it_decides_the_tokens_are_the_same(machine: Engine, temperature: float) -> None:
    used: set[str] = set()
    for seed in range(4):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 80, "logit_bias": FAVOURITES}
        (plain,) = run(machine, request(LOOP * 3, **options))
        (auto,) = run(machine, request(LOOP * 3, draft="auto", **options))
        assert auto.answer == plain.answer and not auto.warnings
        used |= set(auto.counters.arms)
        assert sum(use.rounds for use in auto.counters.arms.values()) == auto.counters.rounds
        assert sum(use.seconds for use in auto.counters.arms.values()) == pytest.approx(auto.counters.decode_seconds)
    assert len(used) > 1 and used <= {"plain", "lookup", LONG_LOOKUP.name, "model"}


def test_a_batch_gives_the_same_tokens_within_its_rows(machine: Engine, decisions: list[list[Decision]]) -> None:
    wanted = [
        request([*LOOP[n:], *LOOP] * 2, draft="auto", max_tokens=40 + n, temperature=0.8 * (n % 2), seed=n)
        for n in range(6)
    ]
    together = run(machine, *wanted)
    assert max(len(mine) for mine in decisions) >= 4
    alone = [run(machine, one)[0] for one in wanted]
    assert [s.answer for s in together] == [s.answer for s in alone]


def test_a_batch_drafts_less_when_rows_are_dear(
    target: Decoder, decisions: list[list[Decision]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that cost as much per row in a batch: alone it drafts, among eight it does not."""
    machine = engine(target, draft_model=target)
    for _ in range(200):
        for rows in (1, 2, 3, 4, 6, 8, 12, 16):
            drafts = (("model", rows - 1, 1),) if rows > 1 else ()
            machine.costs.learn(RoundShape(1, rows, drafts), 1.0, {"model": 1e-6} if drafts else {})
            for sequences in (2, 4, 8):
                machine.costs.learn(RoundShape(sequences, sequences * rows), float(sequences * rows))
    monkeypatch.setattr(machine.costs, "learn", lambda *_: None)  # rounds of this machine cost something else
    run(machine, request(LOOP, draft="auto", max_tokens=40))
    assert max(decision.depth for mine in decisions for decision in mine) >= 4
    decisions.clear()
    run(machine, *(request([*LOOP, n], draft="auto", max_tokens=10) for n in range(8)))
    full = [mine for mine in decisions if len(mine) == 8]
    drafted = sum(decision.depth for mine in full[1:] for decision in mine)
    assert drafted <= 0.2 * 8 * len(full), drafted  # trials are the rest


def test_a_long_match_is_an_arm_of_its_own(machine: Engine) -> None:
    sequence = machine.submit(request(LOOP * 3, draft="auto"), _Nobody())

    def usable(sequence: Sequence) -> dict[str, bool]:
        return {arm: bool(most) for arm, most in machine.drafters.available(sequence).items()}

    assert usable(sequence) == {"lookup": False, LONG_LOOKUP.name: True}
    short = machine.submit(request([*LOOP, *LOOP[: LONG_LOOKUP.evidence - 1]], draft="auto"), _Nobody())
    assert usable(short) == {"lookup": True, LONG_LOOKUP.name: False}
    none = machine.submit(request(LOOP, draft="auto"), _Nobody())
    assert usable(none) == {"lookup": False, LONG_LOOKUP.name: False}
    for one in (sequence, short, none):
        machine.release(one)


class _Nobody:
    def push(self, token: int) -> tuple[str, bool]:
        return "", False

    def flush(self) -> str:
        return ""


def test_rejection_decides_before_it_sees_the_drafts(
    target: Decoder, monkeypatch: pytest.MonkeyPatch, decisions: list[list[Decision]]
) -> None:
    """With arms and depths changing from round to round, the distribution is still the target's."""
    machine = engine(target, draft_model=target)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [20, 21, 20][:depth])
    bias = {20: 9.0, 21: 9.0, 22: 9.0}
    settings: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "accept": "rejection", "logit_bias": bias}
    prompt, length, seeds = LOOP * 2, 4, 800
    choices = iter(range(10**9))

    def unsteady(policy: Policy, asks: list[Ask]) -> list[Decision]:
        """Any rule that looks at the text so far alone must do; this one changes all the time."""
        found = []
        for ask in asks:
            usable = ["model", *(arm for arm, most in (ask.available or {}).items() if most)]
            number = next(choices)
            deep = Decision(usable[number % len(usable)], min(ask.limit, 1 + number % 3))
            found.append(deep if ask.limit > 0 else PLAIN)
        return found

    monkeypatch.setattr(Policy, "decide", unsteady)
    wanted = [request(prompt, max_tokens=length, seed=n, draft="auto", **settings) for n in range(seeds)]
    answers = [answer for n in range(0, seeds, 50) for answer in run(machine, *wanted[n : n + 50])]
    assert not any(answer.warnings for answer in answers)
    assert len({decision for mine in decisions for decision in mine}) >= 4
    counts: dict[tuple[int, ...], int] = {}
    for answer in answers:
        counts[tuple(answer.answer)] = counts.get(tuple(answer.answer), 0) + 1
    expected = joint(target, prompt, length, settings)
    assert fits(counts, expected), chi_square(counts, expected)


def test_costs_are_kept_between_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    first = forerun.load(str(folder))
    assert not first.engine.costs.remembers
    answer = forerun.generate(first, "hello " * 30, max_tokens=40)
    assert answer.seconds_saved is not None
    second = forerun.load(str(folder))
    assert second.engine.costs.remembers and (1, 1) in second.engine.costs.proportions().passes
    assert not second.engine.costs.known  # seconds are measured anew
    assert forerun.generate(second, "hello " * 30, max_tokens=40).tokens == answer.tokens


def test_chunks_and_vocabulary_are_those_of_small_engines() -> None:
    assert len(LOOP * 3) > CHUNK and max(FAVOURITES) < VOCAB
