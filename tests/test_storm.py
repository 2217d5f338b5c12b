"""Two hundred random requests at once, on a dense and on a hybrid model, with faults: every answer as if alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB, decoder, engine, request
from heads import HeadShape, mtp_engine, random_head, write_head
from rules import random_rule
from storm import Storm, Visit, random_visit
from tiny import tiny_model
from tiny_qwen import random_model, save_model

from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine

FAULTS = ["open", "follow", "step", "propose", "propose", "observe", "ready", "close", "sink"]
ARMS = ["off", "lookup", "mtp", "model", "auto", "auto"]
REQUESTS, TOKENS, CONTEXT = 200, 8, 48
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
HYBRID: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


# Which faults come up by chance depends on the arms that `auto` takes, and so on the clock: these always do.
ALONE = 4  # steps of the first visit
SURE = {
    "open": "lookup",
    "observe": "lookup",
    "propose": "lookup",
    "close": "lookup",
    "follow": "mtp",
    "step": "mtp",
    "ready": "auto",
}


def sure_visit(fault: str, arm: str) -> Visit:
    """A request of an arm that calls what fails, before anything else can happen to it. A sequence is asked for what
    it can draft when it is alone, or its batch drafts: that one comes first. Its answer repeats itself.
    """
    depth = None if arm == "auto" else 2
    wish = request([7, 8, 9, 7, 8], max_tokens=TOKENS, draft=arm, draft_tokens=depth, logit_bias={7: 100.0})
    return Visit(wish, 0 if arm == "auto" else ALONE, 0, "run", begin=0, end=0, fault=fault, spared=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("dense"), "llama", **SMALL)


def dense_engine(folder: Path, head: Path, **options: Any) -> Engine:
    """The model drafts for itself too, so that many drafts are right."""
    model = decoder(folder, quantize=True)
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    write_head(head, folder, shape, random_head(shape))
    return mtp_engine(model, head, draft_model=decoder(folder, quantize=True), context=CONTEXT, **options)


def hybrid_engine(folder: Path, hybrid: Path, **options: Any) -> Engine:
    """With the head of its own; the dense model drafts for it."""
    model = decoder(save_model(hybrid, random_model(False, **HYBRID)), quantize=False)
    head = model.native_head()
    assert head is not None
    small = decoder(folder, quantize=False)
    return engine(model, draft_model=small, beside=[MtpDrafter(head, VOCAB)], context=CONTEXT, **options)


def test_constrained_and_free_answers_in_one_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    dice = random.Random(17)
    faults = ["legal", "masks", "forced", "commit", "propose", "sink"]
    visits = [random_visit(dice, ARMS, faults, 2 * TOKENS, arrives=number) for number in range(60)]
    for number, visit in enumerate(visits):
        if number % 3:
            visit.rule = random_rule(number % 7, VOCAB)
            visit.request = replace(visit.request, accept="coupled" if number % 5 else "rejection")
            if visit.request.accept == "rejection":  # of which only the distribution is plain decoding's
                visit.request = replace(visit.request, sampling=replace(visit.request.sampling, temperature=0.0))
    storm = Storm(dense_engine(folder, tmp_path, pages=22), visits)
    storm.engine.scheduler.max_sequences = 6
    storm.run()
    storm.compare(dense_engine(folder, tmp_path))
    happened = ["parked", "pause", "cancel", "extended", "accepted", "stop", "length", "error"]
    assert all(storm.seen[name] for name in happened), storm.seen


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_every_answer_is_the_one_it_would_be_alone(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)  # answers without a maximum must grow
    make = dense_engine if kind == "dense" else hybrid_engine
    dice = random.Random(13)
    visits = [random_visit(dice, ARMS, FAULTS, TOKENS, arrives=ALONE + number) for number in range(REQUESTS)]
    visits += [sure_visit(*pair) for pair in SURE.items()]
    storm = Storm(make(folder, tmp_path, pages=20), visits)
    storm.engine.scheduler.max_sequences = 6  # some must wait for a place in the rounds, with and without pages
    storm.break_passes({40: RuntimeError("no pass"), 111: torch.OutOfMemoryError("no memory"), 200: ValueError("no")})
    storm.run()
    storm.compare(make(folder, tmp_path))
    assert storm.engine.pool.free == storm.engine.pool.count
    happened = [
        "parked",
        "parked while idle",
        "pause",
        "cancel",
        "give up",
        "extended",
        "accepted",
        "stop",
        "length",
        "cancelled",
        "error",
        "fault in a pass",
    ]
    assert all(storm.seen[name] for name in happened), storm.seen
    assert not [name for name in SURE if not storm.seen[f"fault in {name}"]]
