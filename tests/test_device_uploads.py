"""Drafts that the host uploads are for one round, and a round that nobody waits for any more is charged to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_engines import PROMPTS, answers, device_engine, tell, tiny_folder
from engines import NoText, Scripted, finish, request

from forerun.cache.pages import PagePool, SequenceCache
from forerun.engine import scheduler
from forerun.kernels.interface import AttentionSpec, HeadLayout
from forerun.policy.decision import PLAIN, Decision

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]


@torch.inference_mode()
def test_drafts_of_an_earlier_round_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong when they were made and right a round later, in a slot that decodes plainly beside a wider one."""
    engine = device_engine(tiny_folder(tmp_path), None)
    prompt, wish = [7 + n for n in range(28)], {"temperature": 0.8, "seed": 8}
    (whole,) = answers(engine, request(prompt, max_tokens=8, **wish))
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    monkeypatch.setattr(scheduler, "MAX_DEPTH", 0)

    def script(text: list[int], depth: int) -> list[int]:
        at = len(text) - len(prompt)
        return whole[at + 1 : at + 1 + depth] if text[:2] == prompt[:2] else [1] * depth

    engine.drafters.texts["lookup"] = Scripted(script)
    beside = engine.submit(request([40, 41, 42], max_tokens=30, draft="lookup"), NoText())
    sequence = engine.submit(request(prompt, max_tokens=None, draft="lookup", **wish), NoText())
    first = [True]
    tell(engine, lambda ask: Decision("lookup", 3) if ask.id == beside.id or (first and first.pop()) else PLAIN)
    while len(sequence.answer) < 8 and sequence.error is None:
        engine.step()
    assert sequence.answer[:8] == whole and sequence.counters.accepted <= sequence.counters.drafted
    for one in (beside, sequence):
        engine.release(one)


@torch.inference_mode()
def test_a_round_after_a_stop_string_is_charged_to_nobody(tmp_path: Path) -> None:
    class Stop(NoText):
        pushed = 0

        def push(self, token: int) -> tuple[str, bool]:
            self.pushed += 1
            return "", self.pushed == 3

    engine = device_engine(tiny_folder(tmp_path), None)
    sequence = engine.submit(request(PROMPTS[0], max_tokens=20), Stop())
    finish(engine, [sequence])
    seconds, rounds = sequence.counters.decode_seconds, sequence.counters.rounds
    engine.settle()
    assert (sequence.counters.decode_seconds, sequence.counters.rounds) == (seconds, rounds)
    engine.release(sequence)


def test_a_sequence_that_moved_in_any_group_is_noticed() -> None:
    layout, cpu = HeadLayout(2, 1, 16), torch.device("cpu")
    specs = [AttentionSpec(layout, window=8), AttentionSpec(layout)]
    pool = PagePool(specs, 40, 8, torch.float32, cpu, on_device=True)
    moved, other = SequenceCache(pool), SequenceCache(pool)
    moved.grow(48)
    moved.commit(46)
    before = [list(held) for held in moved.blocks]
    assert moved.still_holds(before)
    moved.park()
    other.grow(64)
    other.commit(62)
    moved.unpark()
    assert moved.blocks[1] != before[1] and not moved.still_holds(before)
