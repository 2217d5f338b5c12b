"""Constraints in the rounds of a device: masks are uploaded, drafts cut; the tokens are those the host chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import PROMPTS, SLOW, device_engine, runner_of, tiny_folder, tiny_head
from engines import VOCAB, NoText, Scripted, finish, request
from rules import Breaking, ByRule, Rule, random_rule

from forerun.draft.arms import FORCED
from forerun.engine.captures import PassShape, Upload
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]


@torch.inference_mode()
def answers(machine: Engine, *wishes: tuple[Any, Any]) -> list[Sequence]:
    found = [machine.submit(wish, NoText(), constraint) for wish, constraint in wishes]
    finish(machine, found)
    for one in found:
        machine.release(one)
    return found


def by_rule(seed: int) -> ByRule:
    return ByRule(random_rule(seed, VOCAB), VOCAB)


SAMPLED: dict[str, Any] = {"temperature": 1.1, "seed": 3, "top_k": 40, "repetition_penalty": 1.2}


@pytest.mark.parametrize("settings", [SAMPLED, pytest.param({}, marks=SLOW)])
def test_the_device_chooses_what_the_host_chooses(settings: dict[str, Any], tmp_path: Path) -> None:
    """The host chooses for a request with log probabilities. Drafts that break a rule are cut, and forced ones run."""
    machine = device_engine(tiny_folder(tmp_path), None)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [17, 18, 19][:depth])
    plain = request(PROMPTS[1], max_tokens=4, **settings)
    drafted = request(PROMPTS[1], max_tokens=4, draft="lookup", draft_tokens=3, **settings)
    by_host = replace(plain, logprobs=0)
    expected, alone = answers(machine, (by_host, by_rule(2)), (by_host, None))
    mine, undrafted, free = answers(machine, (drafted, by_rule(2)), (plain, by_rule(2)), (drafted, None))
    assert mine.error is None and mine.answer == undrafted.answer == expected.answer
    assert free.answer == alone.answer != mine.answer
    assert mine.counters.arms[FORCED.name].accepted and not undrafted.counters.drafted
    assert any(shape.edited for shape in runner_of(machine)._rounds)


def test_masks_belong_to_one_round(tmp_path: Path) -> None:
    """A constraint that rules nothing out for a while, after it did; the slot's next sequence has none."""
    machine = device_engine(tiny_folder(tmp_path), None)
    wish = request(PROMPTS[0], max_tokens=5)
    plain = answers(machine, (wish, None))[0].answer

    class Once(ByRule):
        def masks(self, drafts: Any) -> Any:
            return super().masks(drafts) if len(self.answer) == 1 else None

    rule: Rule = lambda answer: [20] if len(answer) == 1 else range(VOCAB)  # noqa: E731
    (masked,) = answers(machine, (wish, Once(rule, VOCAB)))
    assert masked.answer[:2] == [plain[0], 20] and len(set(masked.answer)) > 2
    assert answers(machine, (wish, None))[0].answer == plain


def test_faults_and_rows_that_are_not_reached(tmp_path: Path) -> None:
    machine = device_engine(tiny_folder(tmp_path), None)
    machine.drafters.texts["lookup"] = Scripted(lambda text, depth: [11, 12][:depth])
    rule: Rule = lambda answer: [9] if answer[-1:] == (11,) else [10, 11]  # noqa: E731 - and 9 is suppressed
    wish = request(
        PROMPTS[0], max_tokens=6, draft="lookup", draft_tokens=2, suppress=frozenset({9}), logit_bias={10: 50.0}
    )
    broken = Breaking(rule, VOCAB, "masks", 2)
    one, two = answers(machine, (wish, ByRule(rule, VOCAB)), (wish, broken))
    assert one.error is None and one.answer == [10] * 6
    assert two.error is broken.error and two.answer == [10] * 2
    dead = request(PROMPTS[0], draft="lookup", draft_tokens=2, suppress=frozenset({9}), logit_bias={11: 50.0})
    (three,) = answers(machine, (dead, ByRule(rule, VOCAB)))
    assert three.answer == [11] and isinstance(three.error, ForerunError)


def test_drafts_of_a_head_are_cut_by_the_host(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    machine = device_engine(folder, tiny_head(tmp_path / "head", folder))
    wish = request(PROMPTS[0], max_tokens=5, draft="mtp", draft_tokens=2)
    (plain,) = answers(machine, (request(PROMPTS[0], max_tokens=5), by_rule(4)))
    mine, free = answers(machine, (wish, by_rule(4)), (wish, None))
    assert mine.error is None and not mine.warnings and mine.answer == plain.answer != free.answer


def test_what_is_captured_for_masks_has_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the tables that were there when it was captured: without any it would never mask."""
    machine = device_engine(tiny_folder(tmp_path), None)
    runner, found = runner_of(machine), list[tuple[bool, bool]]()
    usual = runner._capture

    def capture(shape: PassShape, upload: Upload) -> Any:
        found.append((shape.edited, runner.slots.edits is not None))
        return usual(shape, upload)

    monkeypatch.setattr(runner, "_capture", capture)
    (one,) = answers(machine, (request(PROMPTS[0], max_tokens=3), by_rule(2)))
    assert one.error is None and any(edited for edited, _ in found)
    assert all(there for edited, there in found if edited)
