"""A batch that does not draft: everybody decodes plainly, at once, and no drafter reads prompts."""

from __future__ import annotations

import time

import pytest
import torch
from engines import NoText, Scripted, decoder, engine, finish, request, run
from tiny import tiny_model

from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder
from forerun.policy.batch import BatchPolicy
from forerun.policy.controller import Controller
from forerun.policy.costs import CostTable

PROMPTS = [[5, 6, 7, 8] * 4, [40, 41] * 9, list(range(100, 120)), [9, 8, 7] * 5]


class Verdict(BatchPolicy):
    """Says what a test wants."""

    def __init__(self, drafts: bool) -> None:
        super().__init__()
        self.verdict = drafts

    def drafts(self, able: int, sequences: int) -> bool:
        return self.verdict

    def admits(self, sequences: int) -> bool:
        return self.verdict


class Reader(Scripted):
    """A drafter that looks inside the target."""

    wants_features = True
    rows = 0

    def feed(self, sequence_id: int, features: torch.Tensor) -> None:
        self.rows += len(features)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = decoder(tiny_model(tmp_path_factory.mktemp("target"), "llama"), quantize=True)
    model.taps = (0,)
    return model


def make(target: Decoder, drafts: bool) -> tuple[Engine, Reader]:
    machine, reader = engine(target), Reader(lambda text, depth: text[-1:] * depth, "mtp")
    machine.drafters.by_name["mtp"] = reader
    machine._batch = Verdict(drafts)
    return machine, reader


@pytest.mark.parametrize("drafts", [False, True])
def test_one_verdict_for_everybody(target: Decoder, drafts: bool) -> None:
    machine, _ = make(target, drafts)
    plain = run(machine, *(request(prompt) for prompt in PROMPTS))
    auto = run(machine, *(request(prompt, draft="auto") for prompt in PROMPTS))
    assert [s.answer for s in auto] == [s.answer for s in plain] and not any(s.warnings for s in auto)
    last = auto[-1].counters.arms  # the first ones are alone until others have read their prompts
    assert (set(last) == {"plain"}) is not drafts


@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_are_read_by_drafters_only_where_drafts_may_come(target: Decoder, drafts: bool) -> None:
    machine, reader = make(target, drafts)
    with torch.inference_mode():
        first = machine.submit(request(PROMPTS[0], draft="auto", max_tokens=100), NoText())
        while first.status is not Status.RUNNING:
            machine.step()
        second = machine.submit(request(PROMPTS[1], draft="auto", max_tokens=4), NoText())
        while second.status is not Status.FINISHED:
            machine.step()
    assert ("mtp" in second.arms) is drafts and "lookup" in second.arms
    assert "mtp" in first.arms, "whoever was alone keeps it"
    assert reader.rows


def leave_one(machine: Engine, longer: int) -> Sequence:
    """Two in a batch, of which the first ends soon and the other goes on alone for so many tokens."""
    first = machine.submit(request(PROMPTS[0], draft="auto", max_tokens=20), NoText())
    while first.status is not Status.RUNNING:
        machine.step()
    second = machine.submit(request(PROMPTS[1], draft="auto", max_tokens=20 + longer), NoText())
    while first.status is not Status.FINISHED:
        machine.step()
    return second


@pytest.mark.parametrize("chosen", [False, True])
def test_who_was_left_out_is_followed_once_drafts_may_pay(target: Decoder, chosen: bool) -> None:
    """Alone again, or in a batch that has found out that it pays."""
    machine, reader = make(target, drafts=False)
    with torch.inference_mode():
        second = leave_one(machine, longer=40)
        assert "mtp" not in second.arms and second.left_out == ["mtp"]
        if chosen:
            third = machine.submit(request(PROMPTS[2], draft="auto", max_tokens=60), NoText())
            machine._batch._record(2).drafting, machine._batch._record(2).look = True, 0
        rows, before = reader.rows, len(second.tokens)
        finish(machine, [second, third] if chosen else [second])
    assert "mtp" in second.arms and not second.left_out and not second.warnings
    assert len(second.tokens) - before > 30 and reader.rows - rows >= len(second.tokens) - before - 2
    assert second.answer == run(machine, request(PROMPTS[1], max_tokens=60))[0].answer


def test_nobody_is_taken_in_while_the_batch_does_not_draft(target: Decoder) -> None:
    machine, _ = make(target, drafts=False)
    with torch.inference_mode():
        waiting = [machine.submit(request(p, draft="auto", max_tokens=30), NoText()) for p in PROMPTS[:3]]
        while all(one.status is not Status.FINISHED for one in waiting):
            machine.step()
            assert all(one.left_out for one in waiting[1:] if one.status is Status.RUNNING)


def test_a_drafter_that_cannot_join_late_is_switched_off_for_this_one(target: Decoder) -> None:
    machine, reader = make(target, drafts=False)
    reader.open_late = None  # type: ignore[method-assign, assignment]
    with torch.inference_mode():
        second = leave_one(machine, longer=40)
        finish(machine, [second])
    assert second.arms == ["lookup"] and any("mtp failed" in warning for warning in second.warnings)
    assert second.answer == run(machine, request(PROMPTS[1], max_tokens=60))[0].answer


def test_named_arms_stay(target: Decoder) -> None:
    machine, _ = make(target, drafts=False)
    first, second = run(machine, request(PROMPTS[0], draft="lookup", draft_tokens=2), request(PROMPTS[1], draft="auto"))
    assert first.counters.arms["lookup"].rounds
    assert second.answer == run(machine, request(PROMPTS[1]))[0].answer


def test_a_named_arm_does_not_keep_the_others_from_being_timed(target: Decoder) -> None:
    """It drafts in every round; whether those who leave it to us do is still compared."""
    machine = engine(target)
    machine.drafters.by_name["lookup"] = Scripted(lambda text, depth: text[-1:] * depth)
    named = request(PROMPTS[0], draft="lookup", draft_tokens=2, max_tokens=150)
    with torch.inference_mode():
        who = [
            machine.submit(one, NoText())
            for one in (named, *(request(p, draft="auto", max_tokens=150) for p in PROMPTS[1:]))
        ]
        ways = []
        while all(one.status is not Status.FINISHED for one in who):
            machine.step()
            ways.append(machine._batch.drafts(len(who), len(who)))
    assert any(ways) and not all(ways[:10])


def test_who_is_left_out_is_judged_by_the_rounds_it_will_have(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a drafter whose drafts never leave a device, a constrained answer runs on the device: other costs."""
    machine, _ = make(target, drafts=False)
    tables = {True: CostTable(), False: CostTable()}
    monkeypatch.setattr(machine.executor, "costs_of", lambda sequences: tables["mtp" in sequences[0].arms])
    with torch.inference_mode():
        first = machine.submit(request(PROMPTS[0], draft="auto", max_tokens=100), NoText())
        while first.status is not Status.RUNNING:
            machine.step()
        second = machine.submit(request(PROMPTS[1], draft="auto", max_tokens=4), NoText())
        while second.status is not Status.RUNNING:
            machine.step()
    for sequence, costs in ((first, tables[True]), (second, tables[False])):
        assert isinstance(sequence.policy, Controller) and sequence.policy.costs is costs


def test_what_drafters_do_with_a_prompt_is_not_charged_to_the_rounds_beside_it(
    target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, late, usual = engine(target), [0.0], time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: usual() + late[0])

    class Slow(Scripted):
        def open(self, *prompt: object) -> None:
            late[0] += 1000.0
            super().open(*prompt)  # type: ignore[arg-type]

    machine.drafters.by_name["lookup"] = Slow(lambda text, depth: text[-1:] * depth)
    first = machine.submit(request(PROMPTS[0]), NoText())
    while len(first.answer) < 4:
        machine.step()
    second = machine.submit(request(PROMPTS[1], max_tokens=4, draft="lookup"), NoText())
    finish(machine, [first, second])
    assert first.counters.decode_seconds < 1000 <= second.counters.prefill_seconds
    assert second.counters.decode_seconds < 1000 and machine.costs.pass_seconds(1) < 100
