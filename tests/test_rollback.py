"""Rollback as a property: after any sequence of accepted and rejected drafts, caches equal those of a fresh run."""

from __future__ import annotations

import pytest
import torch
from engines import PAGE, VOCAB, NoText, Scripted, decoder, engine, finish, request
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder

PROMPT = [11, 22, 33, 44, 55, 66, 77, 88, 99, 111, 122]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "qwen3", hidden_size=72, head_dim=12), quantize=True)


@pytest.fixture(scope="module")
def plain(model: Decoder) -> tuple[list[int], torch.Tensor]:
    """Tokens of a run without drafts, and the keys and values it leaves."""
    machine = engine(model)
    sequence = machine.submit(request(PROMPT, max_tokens=60), NoText())
    finish(machine, [sequence])
    return sequence.tokens, contents(sequence, sequence.cache.length)


def contents(sequence: Sequence, length: int) -> torch.Tensor:
    """All keys and values of the first `length` tokens, [layers, 2, kv heads, size, length]."""
    pages = sequence.cache.tables[0].long()
    parts = []
    for layer in sequence.cache.pool.layers:
        keys = layer.keys[pages].permute(1, 2, 0, 3).flatten(2)
        values = layer.values[pages].permute(1, 3, 0, 2).flatten(2)
        parts.append(torch.stack([keys, values])[..., :length])
    return torch.stack(parts)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12))
def test_caches_equal_a_fresh_run_after_every_round(
    model: Decoder, plain: tuple[list[int], torch.Tensor], rounds: list[tuple[int, int]]
) -> None:
    tokens, expected = plain
    plan = iter(rounds)

    def script(text: list[int], depth: int) -> list[int]:
        right, wrong = next(plan, (0, 0))
        truth = tokens[len(text) : len(text) + right]
        return [*truth, *[(t + 1) % VOCAB for t in tokens[len(text) + right : len(text) + right + wrong]]]

    machine = engine(model)
    machine.drafters.texts["lookup"] = Scripted(script)
    sequence = machine.submit(request(PROMPT, max_tokens=60, draft="lookup", draft_tokens=15), NoText())
    with torch.inference_mode():
        while sequence.status is not Status.FINISHED:
            machine.step()
            length = sequence.cache.length
            assert sequence.tokens == tokens[: len(sequence.tokens)]
            assert length == len(sequence.tokens) - 1
            assert torch.equal(contents(sequence, length), expected[..., :length])
            assert len(sequence.cache.pages) * PAGE >= length
    assert sequence.tokens == tokens


def test_parking_keeps_every_bit(model: Decoder) -> None:
    machine = engine(model)
    sequence = machine.submit(request(PROMPT, max_tokens=20), NoText())
    finish(machine, [sequence])
    before = contents(sequence, sequence.cache.length)
    sequence.cache.park()
    other = machine.submit(request(PROMPT[::-1], max_tokens=20), NoText())  # takes the pages that were given back
    finish(machine, [other])
    sequence.cache.unpark()
    assert torch.equal(contents(sequence, sequence.cache.length), before)
    machine.pool.check([sequence.cache, other.cache])
