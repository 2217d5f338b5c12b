"""Qwen3.5 decoders against transformers on tiny random models: full forward, chunked prefill, cached steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_models import load, run
from tiny_qwen import random_model, save_model, tiny_qwen

from forerun.cache.pages import PagePool, SequenceCache
from forerun.cache.recurrent import StateSlots
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.layers.decoder import Decoder

LENGTH = 150
CPU = torch.device("cpu")
CASES = {
    "dense, flat": (False, {}, {}),
    "dense, nested": (False, {}, {"nested": True}),
    "dense, tied, one key head per value head": (
        False,
        {"tie_word_embeddings": True, "linear_num_value_heads": 2},
        {"nested": True},
    ),
    "dense, wide heads": (False, {"linear_value_head_dim": 72, "linear_key_head_dim": 33}, {}),
    "sparse, flat, experts of the head one by one": (True, {}, {"fused": False}),
    "sparse, nested": (True, {}, {"nested": True}),
}


@pytest.fixture(params=["cpu", "reference", "reference, gates joined"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | ReferenceKernels:
    if request.param == "cpu":
        return CpuKernels(quantize=False)
    slow = ReferenceKernels()
    slow.joins_gates = "joined" in request.param  # as on a GPU
    return slow


def pool_of(model: Decoder) -> PagePool:
    return PagePool.for_model(model.config, 64, 8, torch.float32, CPU, slots=2)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_agree_with_transformers(case: str, kernels: CpuKernels | ReferenceKernels, tmp_path: Path) -> None:
    sparse, overrides, layout = CASES[case]
    oracle = random_model(sparse, **overrides)
    model = load(save_model(tmp_path, oracle, **layout), kernels)
    tokens = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = oracle(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3, "a model that says nothing proves nothing"
    pool = pool_of(model)
    torch.testing.assert_close(run(model, SequenceCache(pool), tokens, prefill=True), expected, atol=1e-4, rtol=0)
    # Chunked prefill, then steps of width 1, 4 and more, over page borders and past the recorded rows.
    cache, parts, start = SequenceCache(pool), [], 0
    borders = [(16, True), (18, True), (82, True), (83, False), (87, False), (88, False), (104, False), (LENGTH, False)]
    for stop, prefill in borders:
        parts.append(run(model, cache, tokens[start:stop], prefill))
        start = stop
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


def changed(folder: Path, **changes: object) -> Path:
    """The same folder with other entries in its config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention", "mamba", "full_attention"]}, "mamba"),
        ({"linear_num_value_heads": 3}, "value heads"),
        ({"text_config": 5}, "text_config"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=message):
        load(changed(tiny_qwen(tmp_path), **changes), ReferenceKernels())


def test_layers_without_a_list_follow_the_interval(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    folder = save_model(tmp_path, random_model(False, layer_types=kinds))
    changed(folder, layer_types=None, full_attention_interval=2)
    assert len(load(folder, ReferenceKernels()).config.attention) == 2


def test_a_pool_within_memory(tmp_path: Path) -> None:
    """Pages for attention layers only; state takes at most half."""
    config = load(tiny_qwen(tmp_path), ReferenceKernels()).config
    assert config.delta is not None
    each = StateSlots.bytes_per_slot(config.delta, config.recurrent_layers)
    pool = PagePool.within(config, 10_000, 8, 10 * each, torch.float32, CPU)
    assert pool is not None and pool.states is not None
    assert len(pool.layers) == 1 and pool.states.count + pool.prefix.most_states == 5 and pool.prefix.most_states == 1
    assert pool.count == 5 * each // (2 * 2 * 16 * 4 * 8)
    assert PagePool.within(config, 10_000, 8, 3 * each, torch.float32, CPU) is None
    without = PagePool.within(config, 10_000, 8, 10 * each, torch.float32, CPU, prefix_cache=False)
    assert without is not None and without.states is not None
    assert without.states.count == 5 and not without.prefix.most_states
