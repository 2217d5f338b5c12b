"""A head computes what it was trained to: its entries and its drafts beside a twin written with plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, VOCAB, NoText, decoder, finish, request
from heads import (
    ODD,
    SHAPE,
    HeadShape,
    TwinPass,
    Weights,
    drafts_of,
    fuse,
    mtp_engine,
    observe,
    prompts,
    random_head,
    twin,
    write_head,
)
from tiny import tiny_model

from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as Running
from forerun.models.layers.decoder import Decoder
from forerun.policy.decision import PLAIN, Decision

VARIANTS = {
    "taps": ("llama", SHAPE),
    "no taps": ("llama", HeadShape(72)),
    "another shape": ("llama", HeadShape(72, heads=6, kv_heads=3, size=12, inner=50, theta=500.0, taps=(0,))),
    "biases": ("qwen2", HeadShape(72, bias=True, taps=(2, 1))),
    "head norms": ("qwen3", HeadShape(72, head_norms=True, taps=(2,))),
}


@dataclass
class Pair:
    """A head as the engine runs it, and its twin."""

    model: Decoder
    shape: HeadShape
    weights: Weights
    folder: Path

    def teacher_forced(self, tokens: list[int]) -> TwinPass:
        """The twin over all slots of a text that have a next token."""
        features, _ = observe(self.model, tokens[:-1], self.shape.taps)
        hidden = fuse(self.weights, self.shape, features)
        return twin(self.weights, self.shape, self.model.embedding, hidden, torch.tensor(tokens[1:]))

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs @ self.model.output_rows(torch.arange(300)).T


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, shape = VARIANTS[request.param]
    root = tmp_path_factory.mktemp("pair")
    target = tiny_model(root / "target", family, **ODD)
    weights = random_head(shape, seed=8)
    return Pair(decoder(target, quantize=False), shape, weights, write_head(root / "head", target, shape, weights))


def entries(machine: Engine, sequence: Running) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the head has of a text, by position, each [kv heads, positions, size]."""
    cache, layer = sequence.cache, machine.pool.parts["mtp"][0]
    pages = cache.tables[layer.group].long()
    keys = layer.keys[pages].permute(1, 0, 3, 2).flatten(1, 2)
    values = layer.values[pages].permute(1, 0, 2, 3).flatten(1, 2)
    return keys[:, : cache.length], values[:, : cache.length]


def check_entries(pair: Pair, machine: Engine, sequence: Running) -> None:
    """All that the head has of a sequence beside a teacher-forced pass of its twin: slot s is entry s + 1."""
    known = sequence.followed["mtp"]
    assert known.stop is None and sequence.cache.length == len(sequence.tokens) - 1
    expected = pair.teacher_forced(sequence.tokens[:-1])
    for found, wanted in zip(entries(machine, sequence), (expected.keys, expected.values), strict=True):
        torch.testing.assert_close(found[:, known.start :], wanted[:, known.start - 1 :], rtol=0, atol=1e-4)


def plain_between(machine: Engine, first: int, last: int) -> None:
    """Rounds of answers of so many tokens are plain ones, whoever follows them."""
    usual = machine.policy.decide
    running = machine.scheduler.active

    def decide(asks: Any) -> list[Decision]:
        answers = {sequence.id: len(sequence.answer) for sequence in running}
        made = usual(asks)
        return [PLAIN if first < answers[ask.id] < last else one for ask, one in zip(asks, made, strict=True)]

    machine.policy.decide = decide  # type: ignore[method-assign]


@pytest.mark.parametrize("read", [256, 5])
def test_the_entries_equal_a_teacher_forced_pass(pair: Pair, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After prompts of which the whole or the end was read, drafts that were right and wrong, and plain rounds."""
    monkeypatch.setattr("forerun.engine.engine.READ_BY_HEADS", read)
    monkeypatch.setattr(MtpDrafter, "warm", 4)
    for prompt in prompts(6):
        machine = mtp_engine(pair.model, pair.folder)
        plain_between(machine, 8, 20)
        sequence = machine.submit(request(prompt, max_tokens=30, draft="mtp", draft_tokens=3), NoText())
        finish(machine, [sequence])
        assert sequence.counters.drafted > 20
        assert (sequence.followed["mtp"].start > 1) == (read == 5 and len(prompt) >= CHUNK + read)
        check_entries(pair, machine, sequence)
        machine.release(sequence)


def test_the_entries_after_a_late_beginning_parking_and_continuing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MtpDrafter, "warm", 4)
    machine = mtp_engine(pair.model, pair.folder)
    usual = machine.policy.follows
    sequence = machine.submit(request(prompts(3)[2], max_tokens=20, draft="mtp", draft_tokens=3), NoText())

    def follows(id: int) -> frozenset[str]:
        return usual(id) if len(sequence.answer) >= 6 else frozenset()

    machine.policy.follows = follows  # type: ignore[method-assign]
    made = drafts_of(machine)
    finish(machine, [sequence])
    start = len(sequence.request.prompt) + 5
    assert sequence.followed["mtp"].start == start
    assert len(made[0][0]) == start + 1 + 4, "it drafts once it has so many entries"
    sequence.cache.park()
    other = machine.submit(request(prompts(2)[1], max_tokens=4), NoText())
    finish(machine, [other])
    machine.resume(sequence, 15)
    finish(machine, [sequence])
    assert sequence.followed["mtp"].start == start
    check_entries(pair, machine, sequence)


@pytest.mark.parametrize("read", [256, 5])
def test_drafts_follow_the_twin_to_any_depth(pair: Pair, read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft of every round; a head that has read the end of a prompt sees a text that begins there."""
    monkeypatch.setattr("forerun.engine.engine.READ_BY_HEADS", read)
    monkeypatch.setattr(MtpDrafter, "warm", 0)
    for prompt in prompts(4):
        machine = mtp_engine(pair.model, pair.folder)
        made = drafts_of(machine)
        sequence = machine.submit(request(prompt, max_tokens=9, draft="mtp", draft_tokens=5), NoText())
        finish(machine, [sequence])
        assert len(made) > 2 and len(made[0][1]) == 5
        for tokens, drafts in made:
            check_drafts(pair, tokens, drafts, sequence.followed["mtp"].start)
        machine.release(sequence)


def check_drafts(pair: Pair, tokens: list[int], drafts: list[int], first: int) -> None:
    """Beside those of the twin after `tokens`, whose head has the entries from `first` on."""
    features, _ = observe(pair.model, tokens[:-1], pair.shape.taps)
    hidden = fuse(pair.weights, pair.shape, features)[first - 1 :]
    embedding = pair.model.embedding
    passed = twin(pair.weights, pair.shape, embedding, hidden, torch.tensor(tokens[first:]), begin=first)
    last = passed.outputs[-1:]
    for depth, draft in enumerate(drafts):
        token = int(pair.logits(last)[0, :VOCAB].argmax())
        assert token == draft
        slot = torch.tensor([len(tokens) - first + depth])
        step = twin(pair.weights, pair.shape, embedding, last, torch.tensor([token]), passed, slot, first)
        passed = TwinPass(
            step.outputs, torch.cat([passed.keys, step.keys], 1), torch.cat([passed.values, step.values], 1)
        )
        last = step.outputs
