"""The storm on a device, or in Triton's interpreter: rounds run ahead while requests come, go, fail and are edited."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_engines import DEVICE, SLOW, capture_as_a_gpu_does, device_engine, runner_of, tiny_folder, tiny_head
from engines import VOCAB, request
from rules import random_rule
from storm import Storm, Visit, random_visit
from tiny_qwen import random_model, save_model

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]
ARMS, FAULTS = ["off", "lookup", "mtp", "auto"], ["open", "observe", "ready", "close", "propose", "sink"]


def constrain(number: int, visit: Visit) -> None:
    """Some follow rules, some faults are their rules'; the host decides for some beside the others."""
    wish = visit.request
    if number % 3:
        visit.rule = random_rule(number % 7, VOCAB)
        visit.fault = "masks" if visit.fault == "open" else "legal" if visit.fault == "close" else visit.fault
    if number % 5 == 0:
        wish = replace(wish, logprobs=number % 3, prompt_logprobs=number % 2 == 0)
    if number % 4 == 0:  # of which only the distribution is plain decoding's where it is not greedy
        wish = replace(wish, accept="rejection", sampling=replace(wish.sampling, temperature=0.0))
    visit.request = wish


def agreed(arm: str, tokens: int) -> Visit:
    """A random model agrees with few drafts; a bias makes it say what whoever drafts from the prompt expects."""
    wish = request([7] * 8, max_tokens=tokens, draft=arm, draft_tokens=2, temperature=0.0, logit_bias={7: 100.0})
    return Visit(wish, arrives=0, more=0, happens="run", begin=0, end=0, fault=None, spared=0)


@pytest.mark.parametrize("count", [pytest.param(200 if DEVICE.type == "cuda" else 40, marks=SLOW), 6])
@pytest.mark.parametrize("kind", ["dense", pytest.param("hybrid", marks=SLOW)])
@pytest.mark.parametrize("constrained", [False, pytest.param(True, marks=SLOW)])
def test_every_answer_is_the_one_it_would_be_alone(
    constrained: bool, kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)  # answers without a maximum must grow
    if DEVICE.type == "cpu" and count > 6:
        capture_as_a_gpu_does(monkeypatch)
    if kind == "dense":
        folder = tiny_folder(tmp_path / "model")
        head = tiny_head(tmp_path / "head", folder)
    else:
        folder, head = save_model(tmp_path / "model", random_model(False)), None
    tokens = 8 if DEVICE.type == "cuda" else 4
    sizes = {"context": tokens + 20}
    engine = device_engine(folder, head, native=head is None, pages=6, **sizes)
    alone = device_engine(folder, None, **sizes)
    dice = random.Random(count)
    visits = [random_visit(dice, ARMS, FAULTS, tokens, arrives=number // 2) for number in range(count)]
    if constrained:
        for number, visit in enumerate(visits):
            constrain(number, visit)
    sure = agreed("lookup", tokens)
    visits.append(sure)
    storm = Storm(engine, visits)
    if count > 6:
        storm.break_passes({20: RuntimeError("no pass"), 31: torch.OutOfMemoryError("no memory")})
    storm.run()
    storm.compare(alone)
    engine.pool.check([])
    assert not runner_of(engine).slots.occupants
    assert sure.sequence is not None and sure.sequence.counters.accepted
    # In the interpreter the others are too few and short for a draft of a random model to be surely right.
    assert count == 6 or DEVICE.type != "cuda" or storm.seen["accepted"] > sure.sequence.counters.accepted
