"""Constraints in the rounds of a device: masks are uploaded, drafts cut; the tokens are those of the host's rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import PROMPTS, SLOW, device_engine, device_of, tiny_folder, tiny_head
from engines import VOCAB, NoText, Scripted, finish, request
from rules import Breaking, ByRule, Rule, random_rule

from forerun.draft.arms import FORCED
from forerun.engine.engine import Engine
from forerun.engine.round_graphs import Shape
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
def test_rounds_of_a_device_and_of_the_host_give_the_same_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    device, host = device_engine(folder, None), device_engine(folder, None, rounds=False)
    plain = request(PROMPTS[1], max_tokens=4, **settings)
    drafted = request(PROMPTS[1], max_tokens=4, draft="lookup", draft_tokens=3, **settings)
    expected, alone = answers(host, (plain, by_rule(2)), (plain, None))
    mine, undrafted, free = answers(device, (drafted, by_rule(2)), (plain, by_rule(2)), (drafted, None))
    assert mine.error is None and mine.answer == undrafted.answer == expected.answer
    assert free.answer == alone.answer != mine.answer
    assert mine.counters.arms[FORCED.name].accepted and not undrafted.counters.drafted
    assert device_of(device).slots.edits is not None, "it did not run on the device"


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
    machine.drafters.by_name["lookup"] = Scripted(lambda text, depth: [11, 12][:depth])
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


def test_who_has_drafts_of_the_devices_own_goes_the_hosts_way(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    machine = device_engine(folder, tiny_head(tmp_path / "head", folder))
    wish = request(PROMPTS[0], max_tokens=5, draft="mtp", draft_tokens=2)
    (plain,) = answers(machine, (request(PROMPTS[0], max_tokens=5), by_rule(4)))
    mine, free = answers(machine, (wish, by_rule(4)), (wish, None))
    assert mine.error is None and not mine.warnings and mine.answer == plain.answer != free.answer


def test_what_is_captured_for_masks_has_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the tables that were there when it was captured: without any it would never mask."""
    machine = device_engine(tiny_folder(tmp_path), None)
    rounds, slots = device_of(machine).rounds, device_of(machine).slots
    usual, found = rounds.capture, []

    def capture(shape: Shape) -> None:
        found.append((shape.edited, slots.edits is not None))
        usual(shape)

    monkeypatch.setattr(rounds, "capture", capture)
    (one,) = answers(machine, (request(PROMPTS[0], max_tokens=3), by_rule(2)))
    assert one.error is None and found and all(edited == there for edited, there in found)
