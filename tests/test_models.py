"""Decoders against transformers on tiny random models: full forward, chunked prefill, cached steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from tiny_qwen import FAMILIES, tiny_of

from forerun.cache.pages import PagePool, SequenceCache
from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rope import read_rope
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.config_reader import ConfigReader

LENGTH = 45
ODD = {"hidden_size": 72, "intermediate_size": 88, "head_dim": 20}  # nothing here is a multiple of 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
CASES = {
    "llama": ("llama", {}),
    "llama odd sizes": ("llama", ODD),
    "llama biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "mistral window": ("mistral", {"sliding_window": 17}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "mistral some windows": ("mistral", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 odd sizes": ("qwen3", ODD),
}


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels | ReferenceKernels:
    return CpuKernels(quantize=False) if request.param == "cpu" else ReferenceKernels()


def load(folder: Path, kernels: CpuKernels | ReferenceKernels) -> Decoder:
    return build(open_checkpoint(folder), kernels, torch.device("cpu"), torch.float32, NullProgress())


def run(model: Decoder, cache: SequenceCache, tokens: list[int], prefill: bool) -> torch.Tensor:
    cache.grow(cache.length + len(tokens))
    output = model.forward(make_pass([(cache, tokens)], last_only=False, prompt=prefill))
    cache.commit(len(tokens))
    return output.logits


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_agree_with_transformers(case: str, kernels: CpuKernels | ReferenceKernels, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, overrides = CASES[case]
    folder = tiny_model(tmp_path, family, **overrides)
    tokens = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    model = load(folder, kernels)
    pool = PagePool(model.config.attention, 16, 8, torch.float32, torch.device("cpu"))
    whole = run(model, SequenceCache(pool), tokens, prefill=True)
    torch.testing.assert_close(whole, oracle, atol=1e-4, rtol=0)
    # Chunked prefill, then steps of width 1, 4 and the rest, over page borders.
    cache, parts, start = SequenceCache(pool), [], 0
    for stop, prefill in [(16, True), (21, True), (22, False), (26, False), (27, False), (LENGTH, False)]:
        parts.append(run(model, cache, tokens[start:stop], prefill))
        start = stop
    torch.testing.assert_close(torch.cat(parts), oracle, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["none", "int8"])
@torch.inference_mode()
def test_an_output_matrix_of_its_own_counts_whatever_the_config_says(quantize: str, tmp_path: Path) -> None:
    """As in transformers; copies of the embedding are left alone."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder, tokens = tiny_model(tmp_path / "model", "llama"), torch.arange(20).tolist()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    convert(str(folder), tmp_path / "converted", quantize=quantize)
    for place in (folder, tmp_path / "converted"):
        model = load(place, CpuKernels(quantize=False))
        pool = PagePool(model.config.attention, 16, 8, torch.float32, torch.device("cpu"))
        found = run(model, SequenceCache(pool), tokens, prefill=True)
        assert not model.config.tied
        torch.testing.assert_close(found, oracle, atol=0.5 if place != folder and quantize == "int8" else 1e-4, rtol=0)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, ReferenceKernels()).config.tied


def test_missing_leftover_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"

    def broken(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ForerunError) as caught:
            load(folder, ReferenceKernels())
        return str(caught.value)

    assert name in broken({key: value for key, value in weights.items() if key != name})
    assert "model.layers.0.strange" in broken({**weights, "model.layers.0.strange": torch.ones(2)})
    assert name in broken({**weights, name: torch.ones(3, 3)})


@pytest.mark.parametrize("name", ["strange.weight", "model.layers.0.strange", "model.language_model.layers.1.strange"])
@pytest.mark.parametrize("family", FAMILIES)
def test_leftover_tensors_are_named_in_every_family(family: str, name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_of(tmp_path, family)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForerunError, match=rf"tensors that a {family} model does not have: {name}$"):
        load(folder, ReferenceKernels())


def test_unknown_family_and_rope_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ForerunError, match=r"config\.json: model type 'mamba' is not supported"):
        load(folder, ReferenceKernels())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "longrope"}}))
    with pytest.raises(ForerunError, match="longrope"):
        load(folder, ReferenceKernels())


@pytest.mark.parametrize("parameters", [{}, LINEAR, LLAMA3, YARN, YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}])
def test_rope_parameters_come_back(parameters: dict[str, object]) -> None:
    """A trained head's config.json says them in the same words."""
    rope = read_rope(ConfigReader({"rope_parameters": parameters, "max_position_embeddings": 128}, "here"), 16)
    assert read_rope(ConfigReader({"rope_parameters": rope.parameters()}, "here"), 16) == rope


def test_models_call_no_product_of_their_own() -> None:
    """One place where bits are kept: products and attention are called from kernels/ only."""
    import re

    import forerun.models

    banned = re.compile(r"matmul|\.mm\(|bmm\(|F\.linear|einsum|scaled_dot_product|baddbmm| @ ")
    for file in Path(forerun.models.__path__[0]).rglob("*.py"):
        assert not banned.search(file.read_text()), f"{file.name} multiplies by itself"
