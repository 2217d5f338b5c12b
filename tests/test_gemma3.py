"""Gemma 3 against transformers on tiny random models: new and old configs, alone and beside a tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import decoder, engine, request
from engines import run as answer
from safetensors.torch import load_file, save_file
from test_models import load, run
from tiny import tiny_tokenizer

from forerun.cache.pages import PagePool, SequenceCache
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels

LENGTH, WINDOW = 45, 11
TOKENS = torch.randint(0, 290, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
LINEAR = {"rope_type": "linear", "factor": 8.0}


def write(folder: Path, layout: str) -> Any:
    """A folder, and the model to compare with."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=112, num_hidden_layers=6, sliding_window=WINDOW,
        num_attention_heads=4, num_key_value_heads=2, head_dim=20, query_pre_attn_scalar=30, initializer_range=0.15,
        final_logit_softcapping=4.0, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e6, **LINEAR},
        },
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = Gemma3ForCausalLM(config).float().eval()
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            parameter.data.normal_(0.0, 0.2)
    oracle.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    if layout != "new":
        for key in ("rope_parameters", "layer_types"):
            del values[key]
        values |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR, "sliding_window_pattern": 6}
    if layout == "nested":
        values = {"model_type": "gemma3", "text_config": values}
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
        save_file(tensors | {"vision_tower.x.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))
    return oracle


@pytest.mark.parametrize("layout", ["new", "old", "nested"])
@torch.inference_mode()
def test_logits_agree_with_transformers(layout: str, tmp_path: Path) -> None:
    expected = write(tmp_path, layout)(torch.tensor([TOKENS])).logits[0]
    model = load(tmp_path, CpuKernels(quantize=False))
    cache = SequenceCache(PagePool.for_model(model.config, 16, 8, torch.float32, torch.device("cpu")))
    parts = [run(model, cache, TOKENS[:20], True), run(model, cache, TOKENS[20:21], False)]
    found = torch.cat([*parts, run(model, cache, TOKENS[21:], False)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantize", [True, False])
def test_drafts_change_nothing(quantize: bool, tmp_path: Path) -> None:
    write(tmp_path, "new")
    model, prompt = decoder(tmp_path, quantize), [5, 6, 7, 8] * 6
    (plain,) = answer(engine(model), request(prompt, max_tokens=40))
    machine = engine(model, draft_model=model)
    for arm in ("model", "lookup"):
        (drafted,) = answer(machine, request(prompt, max_tokens=40, draft=arm, draft_tokens=4))
        assert drafted.answer == plain.answer and (arm == "lookup" or drafted.counters.accepted > 20)


def test_a_cap_on_scores_is_refused_by_name(tmp_path: Path) -> None:
    """No Gemma 3 has one, and transformers reads none: whatever a config means by it would be another model."""
    write(tmp_path, "new")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"attn_logit_softcapping": 50.0}))
    with pytest.raises(ForerunError, match=r"attn_logit_softcapping = 50\.0 is not supported"):
        load(tmp_path, CpuKernels(quantize=False))
