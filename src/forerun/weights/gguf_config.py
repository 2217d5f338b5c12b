"""GGUF metadata and tensor names, said in Hugging Face's words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ForerunError
from forerun.kernels.formats import GGUF_FORMATS
from forerun.weights.gguf_gemma import GEMMA, gemma_config
from forerun.weights.gguf_gemma import LAYER_NAMES as GEMMA_LAYER_NAMES
from forerun.weights.gguf_gemma import TOP_NAMES as GEMMA_TOP_NAMES
from forerun.weights.gguf_header import GgufHeader, header_of
from forerun.weights.gguf_metadata import Metadata, decimal
from forerun.weights.gguf_qwen3_5 import BLOCK, QWEN3_5, SPARSE, head_name, qwen3_5_config
from forerun.weights.gguf_qwen3_5 import LAYER_NAMES as QWEN3_5_LAYER_NAMES
from forerun.weights.gguf_tokenizer import generation_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES |= QWEN3_5 | GEMMA
MISTRAL = "MistralForCausalLM"  # GGUF files of Mistral models say "llama"

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    f"{name}.{kind}": f"{theirs}.{kind}"
    for kind in ("weight", "bias")
    for name, theirs in {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }.items()
}
# Keys that llama.cpp obeys where other models set them; 0 and, but for the scale of scores, 1 leave things as they are.
UNREAD = (
    *(f"attention.{name}" for name in ("scale", "output_scale", "clamp_kqv", "max_alibi_bias", "temperature_scale")),
    *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "attn_logit_softcapping"),
    *("rope.scale_linear", "rope.scaling.alpha", "rope.scaling.attn_factor"),
    *(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", "log_multiplier")),
)
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 and later: the file holds the factors these values give, not the values.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def descriptions(file: Path) -> dict[str, dict[str, Any]]:
    """What config.json and generation_config.json would say, by the names of these files."""
    return _described(file, header_of(file))


@lru_cache(maxsize=4)
def _described(file: Path, header: GgufHeader) -> dict[str, dict[str, Any]]:
    config = config_from(header, str(file), _rope_factors(header, file))
    return {"config.json": config, "generation_config.json": generation_config(header, file)}


def _rope_factors(header: GgufHeader, file: Path) -> list[float] | None:
    """The content of rope_freqs.weight, which Llama 3.1 files carry in place of their rope scaling."""
    tensor = next((tensor for tensor in header.tensors if tensor.name == ROPE_FACTORS), None)
    if tensor is None:
        return None
    form = GGUF_FORMATS.get(tensor.kind)
    with file.open("rb") as stream:
        stream.seek(tensor.offset)
        raw = np.frombuffer(stream.read(tensor.size), np.uint8)
    if form is None or len(raw) != tensor.size or not form.finite(raw.reshape(-1, form.bytes)):
        raise ForerunError(f"{file} is damaged: tensor {ROPE_FACTORS} holds no numbers; download it again")
    factors: list[float] = form.unpack(raw.reshape(-1, form.bytes)).reshape(-1).tolist()
    return factors


def config_from(header: GgufHeader, where: str, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The config.json of the model in the file; `rope_factors` is the content of rope_freqs.weight, if there is one."""
    metadata = Metadata(header, where)
    _refuse_unknown(metadata)
    if metadata.architecture in GEMMA:
        config = gemma_config(metadata, rope_factors)
    elif metadata.architecture in QWEN3_5:
        rotated = metadata.integer("rope.dimension_count")
        config = qwen3_5_config(metadata, _rope(metadata, rotated, rope_factors))
    else:
        config = _llama_config(metadata, rope_factors)
    return {"architectures": [ARCHITECTURES[metadata.architecture]]} | config


def _llama_config(metadata: Metadata, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    common = metadata.common_config()
    heads = common["num_attention_heads"]
    head_dim = metadata.integer("attention.key_length", max(common["hidden_size"] // heads, 1))
    _check_heads(metadata, head_dim)
    config = common | {
        "model_type": metadata.architecture,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in metadata.shapes,
    }
    if metadata.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in metadata.shapes
        config |= _mistral(metadata)
    return config


def _refuse_unknown(metadata: Metadata) -> None:
    architecture, where = metadata.architecture, metadata.where
    if architecture == "clip":
        raise ForerunError(
            f"{where} holds what sees or hears, without the language model (mmproj): give the GGUF file of the model; "
            "pictures and sound need its safetensors folder"
        )
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ForerunError(f"{where}: GGUF architecture {architecture[:40]!r} is not read (known: {known})")
    if metadata.values.get("expert_count") and architecture not in (*GEMMA, SPARSE):
        raise ForerunError(f"{where}: mixture-of-experts GGUF files are not read")
    if any(key.startswith("prism.hadamard") for key in metadata.everything):
        raise ForerunError(f"{where}: its weights are stored rotated (prism.hadamard), which is not read")
    for key in UNREAD:
        if metadata.values.get(key) not in (None, 0, 0 if key == "attention.scale" else 1):
            raise ForerunError(f"{metadata.name(key)} changes what a model computes, and is not read")
    if metadata.values.get("attention.causal") is False:
        raise ForerunError(f"{where}: a model whose tokens see those behind them writes no text (attention.causal)")
    parts = metadata.everything.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ForerunError(f"{where}: one of {parts} parts; join them first (llama-gguf-split --merge)")


def _check_heads(metadata: Metadata, head_dim: int) -> None:
    """Heads whose keys and values differ in size, or that are only partly rotated, are other models."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := metadata.integer(key, head_dim)) != head_dim:
            raise ForerunError(f"{metadata.name(key)} is {found}, heads have {head_dim} values")
    if head_dim % 2:
        raise ForerunError(f"{metadata.where}: heads of {head_dim} values cannot be rotated")


def _mistral(metadata: Metadata) -> dict[str, Any]:
    """Mistral files say "llama"; the sliding window or the name gives them away."""
    window = metadata.integer("attention.sliding_window", 0, low=0)
    if not window and "mistral" not in str(metadata.everything.get("general.name", "")).lower():
        return {}
    return {"architectures": [MISTRAL], "model_type": "mistral", "sliding_window": window or None}


def _rope(metadata: Metadata, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base", 10000.0)}
    if factors is not None:
        return rope | _llama3(metadata.where, rope["rope_theta"], head_dim, factors)
    if metadata.values.get("rope.scaling.type") != "yarn":
        return rope | metadata.linear_scaling()
    rope |= {"rope_type": "yarn", "factor": metadata.decimal("rope.scaling.factor")}
    for name in ("beta_fast", "beta_slow"):
        if (key := f"rope.scaling.yarn_{name}") in metadata:
            rope[name] = metadata.decimal(key)
    return rope | {"original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length")}


def _llama3(where: str, theta: float, head_dim: int, factors: Sequence[float]) -> dict[str, Any]:
    """Finds the llama3 scaling behind the stored factors and makes sure that it gives them."""
    factor = decimal(max(factors))
    expected = llama3_factors(theta, head_dim, factor)
    if len(factors) != len(expected) or any(
        not math.isclose(found, wanted, rel_tol=1e-3) for found, wanted in zip(factors, expected, strict=True)
    ):
        raise ForerunError(f"{where}: the factors in {ROPE_FACTORS} are not those of llama3 scaling, which is not read")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """How much slower each pair of a head turns: 1 for short waves, `factor` for long ones, a blend between."""
    result = []
    for pair in range(head_dim // 2):
        turns = LLAMA3_CONTEXT / (2 * math.pi * theta ** (2 * pair / head_dim))  # within the original context
        blend = min(max((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0), 1.0)
        result.append(1 / ((1 - blend) / factor + blend))
    return result


def huggingface_name(name: str, layers: int, where: str, architecture: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    top, parts = TOP_NAMES, LAYER_NAMES
    if architecture in GEMMA:
        top, parts = top | GEMMA_TOP_NAMES, parts | GEMMA_LAYER_NAMES
    elif architecture in QWEN3_5:
        shared = {part: own for part, own in parts.items() if part.endswith(".weight") and part != "ffn_norm.weight"}
        parts = shared | QWEN3_5_LAYER_NAMES
    match = BLOCK.fullmatch(name)
    if match is None:
        found = top.get(name)
    elif (index := int(match[1])) < layers:
        found = f"model.layers.{index}.{parts[match[2]]}" if match[2] in parts else None
    else:
        found = head_name(index - layers, match[2], parts) if architecture in QWEN3_5 else None
    if found is None:
        raise ForerunError(f"{where}: tensor {name[:80]!r} belongs to no model that is read here")
    return found
