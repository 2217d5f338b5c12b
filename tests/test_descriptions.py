"""What a description of a decoder can say beyond the families that are read today, against transformers or a twin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import LENGTH, load, run
from tiny import tiny_model

from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import AttentionSpec, HeadLayout, Kernels
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import read_config
from forerun.models.layers.config import AttentionConfig, DecoderConfig, DenseConfig, LayerConfig
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rope import RopeConfig
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
KERNELS = {"cpu": CpuKernels(quantize=False), "reference": ReferenceKernels()}
WINDOW = 9
TOKENS = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def decoder(config: DecoderConfig, folder: Path, kernels: CpuKernels | ReferenceKernels) -> Decoder:
    return Decoder(config, kernels, open_checkpoint(folder), CPU, torch.float32, NullProgress())


def logits(model: Decoder) -> torch.Tensor:
    """Of a prompt, a step and a few drafts, over borders of pages and of windows."""
    cache = SequenceCache(PagePool.for_model(model.config, 16, 8, torch.float32, CPU))
    parts = [run(model, cache, TOKENS[:20], True), run(model, cache, TOKENS[20:21], False)]
    return torch.cat([*parts, run(model, cache, TOKENS[21:], False)])


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_a_description_in_the_manner_of_gemma_3(kernels: str, tmp_path: Path) -> None:
    """Norms on both sides, gelu, caps, a scale, windows and two rotary tables: words of the description alone."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    written = Gemma3TextConfig(
        vocab_size=300, hidden_size=64, intermediate_size=112, num_hidden_layers=3, layer_types=kinds, head_dim=20,
        num_attention_heads=4, num_key_value_heads=2, query_pre_attn_scalar=30, sliding_window=WINDOW,
        final_logit_softcapping=3.0, initializer_range=0.15, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = Gemma3ForCausalLM(written).float()
    for name, parameter in oracle.named_parameters():
        if "norm" in name:
            parameter.normal_(0.0, 0.2)
    oracle.save_pretrained(tmp_path)

    def layer(kind: str) -> LayerConfig:
        slides = kind == "sliding_attention"
        spec = AttentionSpec(HeadLayout(4, 2, 20), WINDOW if slides else 0, scale=30**-0.5)
        rope = RopeConfig(20, 1e4 if slides else 1e6)
        return LayerConfig(AttentionConfig(spec, rope, head_norms=True), DenseConfig(112, activation="gelu_tanh"))

    config = DecoderConfig(
        family="gemma3_text", hidden=64, vocab=300, context=512, eps=1e-6, tied=True, layers=tuple(map(layer, kinds)),
        zero_centred_norms=True, sandwich_norms=True, embedding_scale=8.0, softcap=3.0,
    )  # fmt: skip
    assert len(config.ropes) == 2 and [spec.window for spec in config.attention] == [WINDOW, 0, WINDOW]
    expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert 2.0 < expected.abs().max() < 3.0, "the cap is felt"
    torch.testing.assert_close(logits(decoder(config, tmp_path, KERNELS[kernels])), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_a_layer_that_reads_the_keys_of_another(kernels: str, tmp_path: Path) -> None:
    """The third layer's keys and values are those of the first, stored once; layers that add nothing make them so."""
    folder = tiny_model(tmp_path, "qwen3", num_hidden_layers=4)
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if name.startswith(("model.layers.0.", "model.layers.1.")) and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            weights[name].zero_()
        if name.startswith("model.layers.2.") and ("input_layernorm" in name or ".k_" in name or ".v_" in name):
            weights[name] = weights[name.replace("layers.2", "layers.0")].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = logits(load(folder, KERNELS[kernels]))
    save_file({n: t for n, t in weights.items() if ".2.self_attn.k_" not in n and ".2.self_attn.v_" not in n},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    config = read_config(open_checkpoint(folder).reader)
    own = config.layers[2].mixer
    assert isinstance(own, AttentionConfig)
    reader = replace(own, spec=replace(own.spec, layout=HeadLayout(4, 0, 16)), source=0)
    layers = (*config.layers[:2], replace(config.layers[2], mixer=reader), config.layers[3])
    config = replace(config, layers=layers)
    assert len(config.attention) == 3 and [config.state_index(layer) for layer in range(4)] == [0, 1, 0, 2]
    torch.testing.assert_close(logits(decoder(config, folder, KERNELS[kernels])), expected, atol=1e-5, rtol=0)


def check_gelu_and_cap(kernels: Kernels, device: torch.device) -> None:
    """The maths, and the bits of a row alone and among others."""
    both = (8 * torch.randn(5, 2 * 37, generator=torch.Generator().manual_seed(2))).to(device)
    gate, up = both.chunk(2, dim=1)
    found = kernels.gelu_mul(both)
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[3:4], kernels.gelu_mul(both[3:4].clone()))
    matrix = kernels.float_matrix(torch.eye(2 * 37, device=device), None)
    capped = kernels.logits(both, matrix, 3.0)
    torch.testing.assert_close(capped.double(), 3 * (both.double() / 3).tanh(), atol=2e-6, rtol=1e-6)
    assert torch.equal(capped[3:4], kernels.logits(both[3:4].clone(), matrix, 3.0))
    assert torch.equal(kernels.logits(both, matrix), both)


@pytest.mark.parametrize("name", KERNELS)
def test_gelu_and_soft_caps(name: str) -> None:
    check_gelu_and_cap(KERNELS[name], CPU)


@pytest.mark.gpu
def test_gelu_and_soft_caps_on_a_gpu() -> None:
    from forerun.kernels.cuda import CudaKernels

    check_gelu_and_cap(CudaKernels(torch.device("cuda")), torch.device("cuda"))
