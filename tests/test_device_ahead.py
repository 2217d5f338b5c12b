"""Rounds are planned before the one under way has ended: what comes of one that was queued for nothing is thrown away.

A sequence that ends, stops for a while or leaves loses a round of rows; no other sequence notices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import DEVICE, SLOW, Knowing, answers, device_engine, runner_of, tiny_folder, tiny_hybrid
from engines import NoText, finish, request

from forerun.engine import scheduler
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status

# Rows that belong to no sequence may overflow; the interpreter says so.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]
PROMPTS = [[5, 6, 7, 8, 9], [40, 41] * 9]
LONG = 14
WISH: dict[str, Any] = {"temperature": 0.8, "seed": 11}


class Texts:
    """A model, the answers to two prompts by plain decoding, and engines that draft them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plain = device_engine(folder, None)
        self.answers = [answers(plain, request(prompt, max_tokens=LONG, **WISH))[0] for prompt in PROMPTS]
        self.texts = [prompt + answer for prompt, answer in zip(PROMPTS, self.answers, strict=True)]

    def engine(self, **options: Any) -> Engine:
        return device_engine(self.folder, None, drafter=Knowing(*self.texts), **options)


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    make = tiny_folder if request.param == "llama" else tiny_hybrid
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if DEVICE.type == "cpu":
            patch.setattr("forerun.kernels.gpu.attention.PROGRAMS", 1)
            patch.setattr("forerun.kernels.gpu.attention.LEAST_SPLITS", 2)
        return Texts(make(tmp_path_factory.mktemp("model")))


class StopsAfter(NoText):
    """A stop string ends the answer with token number `count`."""

    def __init__(self, count: int) -> None:
        self.left = count

    def push(self, token: int) -> tuple[str, bool]:
        self.left -= 1
        return "", self.left == 0


@torch.inference_mode()
@pytest.mark.parametrize("end", ["token", "string", "length"])
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=SLOW), 2])
def test_an_answer_ends_inside_a_round(texts: Texts, end: str, drafts: int) -> None:
    """Another sequence goes on, and a third one takes its pages."""
    engine, (mine, theirs) = texts.engine(), texts.answers
    runner, thrown = runner_of(engine), list[Sequence]()
    usual = runner.threw_away
    runner.threw_away = lambda sequence: thrown.append(sequence) or usual(sequence)  # type: ignore[method-assign]
    how: dict[str, Any] = {"draft": "mtp", "draft_tokens": drafts} if drafts else {}
    length = 4 if end == "length" else LONG
    stop = frozenset({mine[5]}) if end == "token" else frozenset()
    sink = StopsAfter(6) if end == "string" else NoText()
    one = engine.submit(request(PROMPTS[0], max_tokens=length, stop_ids=stop, **how, **WISH), sink)
    other = engine.submit(request(PROMPTS[1], max_tokens=LONG, **how, **WISH), NoText())
    finish(engine, [one])
    assert other.status is not Status.FINISHED
    ends = {"token": mine.index(mine[5]), "string": 6, "length": 4}
    assert one.answer == mine[: ends[end]]
    engine.release(one)
    third = engine.submit(request(PROMPTS[0], max_tokens=3, **how, **WISH), NoText())
    finish(engine, [other, third])
    assert other.answer == theirs and third.answer == mine[:3]
    assert one in thrown if end != "length" or drafts else not thrown
    for sequence in (other, third):
        engine.release(sequence)
    engine.pool.check([])
    assert not runner.slots.occupants


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=SLOW), 3])
def test_an_answer_goes_on_after_its_length_and_after_a_cancel(texts: Texts, drafts: int) -> None:
    """As if it had never stopped: state, position and pending token are those of its text."""
    engine, (mine, theirs) = texts.engine(), texts.answers
    how: dict[str, Any] = {"draft": "mtp", "draft_tokens": drafts} if drafts else {}
    one = engine.submit(request(PROMPTS[0], max_tokens=2, **how, **WISH), NoText())
    other = engine.submit(request(PROMPTS[1], max_tokens=LONG, **how, **WISH), NoText())
    for more in (3, 1, 4):
        finish(engine, [one])
        engine.resume(one, more)
    for _ in range(3):
        engine.step()
        if len(one.answer) < LONG - 4:
            engine.cancel(one)
            assert one.answer == mine[: len(one.answer)]
            engine.resume(one, LONG - len(one.answer))
    finish(engine, [one, other])
    if len(one.answer) < LONG:
        engine.resume(one, LONG - len(one.answer))
        finish(engine, [one])
    assert (one.answer, other.answer) == (mine, theirs)
    for sequence in (one, other):
        engine.release(sequence)
    engine.pool.check([])


@torch.inference_mode()
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_sequence_may_leave_while_its_round_is_under_way(texts: Texts, after: int) -> None:
    """While its prompt is read, before its first token is known, in the middle of its answer."""
    engine, (mine, theirs) = texts.engine(), texts.answers
    one = engine.submit(request(PROMPTS[0], max_tokens=LONG, draft="mtp", draft_tokens=2, **WISH), NoText())
    other = engine.submit(request(PROMPTS[1], max_tokens=LONG, draft="mtp", draft_tokens=2, **WISH), NoText())
    for _ in range(after):
        engine.step()
    engine.release(one)
    engine.pool.check([other.cache])
    again = engine.submit(request(PROMPTS[0], max_tokens=4, **WISH), NoText())
    finish(engine, [other, again])
    assert other.answer == theirs and again.answer == mine[:4] and one.answer == mine[: len(one.answer)]
    for sequence in (other, again):
        engine.release(sequence)
    engine.pool.check([])
    assert not runner_of(engine).slots.occupants


@torch.inference_mode()
def test_an_ended_sequence_loses_its_pages_while_its_round_is_under_way(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied to host memory for a third one, and come back when the first goes on."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    mine, theirs = texts.answers
    engine = texts.engine(pages=5)
    how: dict[str, Any] = {"draft": "mtp", "draft_tokens": 2, **WISH}
    one = engine.submit(request(PROMPTS[0], max_tokens=4, **how), NoText())
    other = engine.submit(request(PROMPTS[1], max_tokens=LONG, **how), NoText())
    third = engine.submit(request(PROMPTS[1], max_tokens=LONG, **how), NoText())
    finish(engine, [one, other, third])
    assert one.cache.parked is not None
    engine.resume(one, LONG - 4)
    finish(engine, [one])
    assert [s.answer for s in (one, other, third)] == [mine, theirs, theirs]
    for sequence in (one, other, third):
        engine.release(sequence)
    engine.pool.check([])


@torch.inference_mode()
def test_pages_are_found_by_parking_the_youngest(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers grow where there is too little for all of them."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    monkeypatch.setattr(scheduler, "MAX_DEPTH", 0)
    engine, order = texts.engine(pages=3), (1, 0, 1)
    how: dict[str, Any] = {"draft": "mtp", "draft_tokens": 2, "max_tokens": LONG, **WISH}
    running = [engine.submit(request(PROMPTS[n], **how), NoText()) for n in order]
    finish(engine, running)
    assert [s.answer for s in running] == [texts.answers[n] for n in order]
    assert engine.scheduler.preemptions
    for sequence in running:
        engine.release(sequence)
    engine.pool.check([])


@torch.inference_mode()
def test_a_sequence_moves_to_a_lower_slot_when_others_have_gone(texts: Texts) -> None:
    """So that the rounds of the rest are small; drafts, pending token and state come along."""
    engine, (mine, theirs) = texts.engine(), texts.answers
    how: dict[str, Any] = {"draft": "mtp", "draft_tokens": 2, **WISH}
    early = [engine.submit(request(PROMPTS[0], max_tokens=2, **how), NoText()) for _ in range(3)]
    late = engine.submit(request(PROMPTS[1], max_tokens=LONG, **how), NoText())
    slots, seen = runner_of(engine).slots, list[int | None]()
    while late.status is not Status.FINISHED:
        engine.step()
        seen.append(slots.slot_of(late))
    assert late.answer == theirs and all(s.answer == mine[:2] for s in early)
    assert seen[0] == 3 and seen[-1] == 0 and late.counters.accepted > 4
    for sequence in (*early, late):
        engine.release(sequence)
    engine.pool.check([])
