"""A head computes what it was trained to: its cache and its drafts beside a twin written with plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import VOCAB, NoText, decoder, finish, request, run
from heads import (
    ODD,
    SHAPE,
    HeadShape,
    TwinPass,
    Weights,
    drafter_of,
    fuse,
    mtp_engine,
    observe,
    prompts,
    random_head,
    twin,
    write_head,
)
from tiny import tiny_model

from forerun.draft.mtp import State
from forerun.draft.protocol import Want
from forerun.engine.sequence import Status
from forerun.models.layers.decoder import Decoder
from forerun.sample import Row, SamplingParams, TokenHistory

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


def contents(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the slots in the cache, each [kv heads, slots, size]."""
    pages, layer = state.cache.tables[0].long(), state.cache.pool.layers[0]
    keys = layer.keys[pages].permute(1, 0, 3, 2).flatten(1, 2)
    values = layer.values[pages].permute(1, 0, 2, 3).flatten(1, 2)
    return keys[:, : state.cache.length], values[:, : state.cache.length]


@pytest.mark.parametrize("most_queued", [1, 9, 256])
def test_the_cache_equals_a_teacher_forced_pass(pair: Pair, most_queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.draft.mtp.MOST_QUEUED", most_queued)
    monkeypatch.setattr("forerun.draft.mtp.FEW", 4)
    for prompt in prompts(6):
        machine = mtp_engine(pair.model, pair.folder)
        drafter = drafter_of(machine)
        # Rounds in the middle go to another arm: their features wait, or are worked off when too many wait.
        sequence = machine.submit(request(prompt, max_tokens=30, draft="mtp", draft_tokens=3), NoText())
        with torch.inference_mode():
            while sequence.status is not Status.FINISHED:
                sequence.policy.fixed = 0 if 8 < len(sequence.answer) < 20 else 3
                machine.step()
                state = drafter._states[sequence.id]
                assert state.fed == sequence.cache.length
                assert state.queued <= max(most_queued, 1 + 3)
            drafter._catch_up([state])
        assert state.cache.length == len(sequence.tokens) - 1
        expected = pair.teacher_forced(sequence.tokens)
        keys, values = contents(state)
        torch.testing.assert_close(keys, expected.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(state.last, expected.outputs[-1], rtol=0, atol=1e-4)


def test_a_head_that_joins_late_sees_a_text_that_begins_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.draft.mtp.LATE", 6)
    machine = mtp_engine(pair.model, pair.folder)
    drafter, (sequence,) = drafter_of(machine), run(machine, request(prompts(3)[2], max_tokens=30))
    tokens, first = sequence.tokens, len(sequence.tokens) - 20  # the pending token when it joins
    features, _ = observe(pair.model, tokens[:-1], pair.shape.taps)
    drafter.open_late(7, tokens[first])
    ready = []
    with torch.inference_mode():
        for place in range(first, len(tokens) - 1):
            ready.append(bool(drafter.ready(7)))
            drafter.observe(7, [tokens[place + 1]])
            drafter.feed(7, features[place : place + 1])
        state = drafter._states[7]
        assert drafter._make_room(state, state.fed, [state])
        drafter._catch_up([state])
    assert ready == [place >= 6 for place in range(19)]
    hidden = fuse(pair.weights, pair.shape, features[first:])
    expected = twin(pair.weights, pair.shape, pair.model.embedding, hidden, torch.tensor(tokens[first + 1 :]))
    for found, wanted in zip(
        (*contents(state), state.last), (expected.keys, expected.values, expected.outputs[-1]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_drafts_follow_the_twin_to_any_depth(pair: Pair) -> None:
    machine = mtp_engine(pair.model, pair.folder)
    drafter = drafter_of(machine)
    for prompt in prompts(4):
        sequence = machine.submit(request(prompt, max_tokens=9, draft="mtp", draft_tokens=2), NoText())
        finish(machine, [sequence])
        tokens = sequence.tokens
        row = Row(SamplingParams(), TokenHistory(tokens), (), len(tokens))
        with torch.inference_mode():
            drafts = [drafter.propose([Want(sequence.id, 5, row, False)])[0].tokens for _ in range(2)]
        assert drafts[0] == drafts[1]  # what the first one wrote is forgotten
        passed = pair.teacher_forced(tokens)
        last = passed.outputs[-1:]
        for depth in range(5):
            token = int(pair.logits(last)[0, :VOCAB].argmax())
            assert token == drafts[0][depth]
            slot = torch.tensor([len(tokens) - 1 + depth])
            step = twin(pair.weights, pair.shape, pair.model.embedding, last, torch.tensor([token]), passed, slot)
            passed = TwinPass(
                step.outputs, torch.cat([passed.keys, step.keys], 1), torch.cat([passed.values, step.values], 1)
            )
            last = step.outputs
        machine.release(sequence)
