"""Gemma 4 against transformers on tiny random models of every variant, past the window, alone and side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import load, run
from tiny_gemma import FULL, SLIDING, VARIANTS, WINDOW, random_gemma, save_gemma

from forerun.cache.pages import PagePool, SequenceCache
from forerun.errors import ForerunError
from forerun.inspection import count_parameters
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import read_config
from forerun.models.layers.rows import make_pass
from forerun.weights.config_reader import ConfigReader

LENGTH = 45
TOKENS = torch.randint(0, 290, (3, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
KERNELS = {"cpu": lambda: CpuKernels(quantize=False), "reference": ReferenceKernels}
LAYOUTS: list[dict[str, Any]] = [{}, {"nested": True}, {"nested": True, "flat": True}]


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request: pytest.FixtureRequest) -> Any:
    return random_gemma(request.param)


@torch.inference_mode()
def expected_logits(oracle: Any, tokens: list[int]) -> torch.Tensor:
    found: torch.Tensor = oracle(torch.tensor([tokens])).logits[0]
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_logits_agree_with_transformers(oracle: Any, kernels: str, tmp_path: Path) -> None:
    expected = expected_logits(oracle, TOKENS[0])
    assert expected.abs().max() > 3.0, "the cap of 5 is felt"
    model = load(save_gemma(tmp_path, oracle), KERNELS[kernels]())
    pool = PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu"))
    whole = run(model, SequenceCache(pool), TOKENS[0], prefill=True)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    cache, parts, start = SequenceCache(pool), [], 0
    for stop, prefill in [(16, True), (21, True), (22, False), (26, False), (27, False), (LENGTH, False)]:
        parts.append(run(model, cache, TOKENS[0][start:stop], prefill))
        start = stop
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)
    assert LENGTH > 2 * WINDOW + 16 and cache.blocks[0].count(-1) > 0, "pages left the window on the way"


@torch.inference_mode()
def test_sequences_of_other_lengths_side_by_side(oracle: Any, tmp_path: Path) -> None:
    """To the oracle in numbers, and to the bit as if alone."""
    model = load(save_gemma(tmp_path, oracle), CpuKernels(quantize=False))
    pool = PagePool.for_model(model.config, 60, 8, torch.float32, torch.device("cpu"))
    lengths, widths = [3, 20, 37], [2, 5, 1]
    caches, alone = [], []
    for tokens, length, width in zip(TOKENS, lengths, widths, strict=True):
        both = [SequenceCache(pool) for _ in range(2)]
        for cache in both:
            run(model, cache, tokens[:length], prefill=True)
        alone.append(run(model, both[0], tokens[length : length + width], prefill=False).clone())
        both[1].grow(length + width)
        caches.append(both[1])
    work = [
        (cache, tokens[length : length + width])
        for cache, tokens, length, width in zip(caches, TOKENS, lengths, widths, strict=True)
    ]
    together = model.forward(make_pass(work, last_only=False)).logits
    assert torch.equal(together, torch.cat(alone))
    for tokens, length, width, mine in zip(TOKENS, lengths, widths, alone, strict=True):
        expected = expected_logits(oracle, tokens)[length : length + width]
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.inference_mode()
def test_every_layout_of_a_checkpoint_is_the_same_model(oracle: Any, layout: dict[str, Any], tmp_path: Path) -> None:
    model = load(save_gemma(tmp_path, oracle, **layout), CpuKernels(quantize=False))
    pool = PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu"))
    found = run(model, SequenceCache(pool), TOKENS[0], prefill=True)
    torch.testing.assert_close(found, expected_logits(oracle, TOKENS[0]), atol=1e-4, rtol=0)


def test_layers_are_named_with_two_digits_in_models_of_more_than_ten() -> None:
    """As in all published ones; transformers writes "05" for the sixth layer."""
    config = json.loads(random_gemma("31B", num_hidden_layers=12, layer_types=None).config.to_json_string())
    assert list(config["per_layer_config"]) == ["05", "11"]
    layers = read_config(ConfigReader(config, "config.json")).attention
    assert [layer.layout.size for layer in layers] == [16, 16, 16, 16, 16, 32] * 2
    assert [layer.layout.kv_heads for layer in layers] == [2, 2, 2, 2, 2, 1] * 2


def test_keys_and_values_are_stored_once_for_all_who_read_them(tmp_path: Path) -> None:
    model = load(save_gemma(tmp_path, random_gemma("E4B")), ReferenceKernels())
    assert [model.config.state_index(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]
    pool = PagePool.for_model(model.config, 4, 8, torch.float32, torch.device("cpu"))
    assert [layer.group for layer in pool.layers] == [0, 0, 1]
    assert [group.window for group in pool.groups] == [WINDOW, 0]
    inner = [layer.feed_forward.inner for layer in model.config.layers]  # type: ignore[union-attr]
    assert inner == [80, 80, 80, 160, 160, 160] and random_gemma("E4B").config.layer_types[5] == FULL


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_int8_weights_are_near_and_rows_keep_their_bits(variant: str, tmp_path: Path) -> None:
    oracle = random_gemma(variant)
    model = load(save_gemma(tmp_path, oracle), CpuKernels(quantize=True))
    pool = PagePool.for_model(model.config, 32, 8, torch.float32, torch.device("cpu"))
    one, other = SequenceCache(pool), SequenceCache(pool)
    for cache in (one, other):
        run(model, cache, TOKENS[0][:20], prefill=True)
    wide = run(model, one, TOKENS[0][20:28], prefill=False).clone()
    steps = torch.cat([run(model, other, TOKENS[0][at : at + 1], prefill=False).clone() for at in range(20, 28)])
    assert torch.equal(wide, steps)
    expected = expected_logits(oracle, TOKENS[0])[20:28]
    assert torch.nn.functional.cosine_similarity(wide, expected).mean() > 0.93


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a layer that cannot read": (
        {"per_layer_config": {"2": {"head_dim": 32}, "4": {"head_dim": 8}, "5": {"head_dim": 32}}},
        "layer 4 cannot read the keys of its kind",
    ),
    "another key": ({"per_layer_config": {"2": {"sliding_window": 3}}}, "changes 'sliding_window'"),
    "a layer too many": ({"per_layer_config": {"6": {"head_dim": 32}}}, "names layer '6'"),
    "nobody to share with": ({"num_kv_shared_layers": 6}, "no (full|sliding)_attention layer is left"),
    "fewer rows than tokens": (
        {"vocab_size_per_layer_input": 290},
        "vocab_size_per_layer_input must be a whole number from 300",
    ),
    "kinds": ({"layer_types": [FULL] * 5}, "must name 6 layers"),
    "attention in both directions": ({"use_bidirectional_attention": "all"}, "'all' is not supported"),
    "another activation": ({"hidden_activation": "silu"}, "'silu' is not supported"),
    "a strange rotation": (
        {"rope_parameters": {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "spiral"}}},
        "'spiral' is not supported",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_configs_that_cannot_be_are_refused_by_name(wrong: str) -> None:
    changes, words = WRONG[wrong]
    config = json.loads(random_gemma("E4B").config.to_json_string()) | changes
    with pytest.raises(ForerunError, match=words):
        read_config(ConfigReader(config, "config.json"))


def test_parameters_are_those_of_the_file(tmp_path: Path) -> None:
    """All but the vectors: norms and scalars."""
    oracle = random_gemma("E4B")
    model = load(save_gemma(tmp_path, oracle), ReferenceKernels())
    tensors = oracle.state_dict().items()
    assert count_parameters(model) == sum(t.numel() for name, t in tensors if t.dim() > 1 and name != "lm_head.weight")
