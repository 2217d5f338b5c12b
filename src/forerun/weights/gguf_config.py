"""GGUF metadata and tensor names, said in Hugging Face's words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.gguf_gemma import GEMMA, gemma_config, gemma_name
from forerun.weights.gguf_header import GgufHeader
from forerun.weights.gguf_metadata import Metadata, decimal
from forerun.weights.gguf_qwen3_5 import QWEN3_5, SPARSE, qwen3_5_config, qwen3_5_name
from forerun.weights.gguf_qwen_tokens import unused_tokens

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES |= QWEN3_5 | GEMMA
MISTRAL = "MistralForCausalLM"  # GGUF files of Mistral models say "llama"

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
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
}
# Keys that llama.cpp obeys where other models set them; 0 and, but for the scale of scores, 1 leave things as they are.
UNREAD = (
    *(f"attention.{name}" for name in ("scale", "output_scale", "clamp_kqv", "max_alibi_bias", "temperature_scale")),
    *("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "attn_logit_softcapping"),
    *("rope.scale_linear", "rope.scaling.alpha", "rope.scaling.attn_factor"),
    *(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", "log_multiplier")),
)
ROPE_FACTORS = "rope_freqs.weight"
LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
# Llama 3.1 and later: the file holds the factors these values give, not the values.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def config_from(header: GgufHeader, where: str, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The config.json of the model in the file; `rope_factors` is the content of rope_freqs.weight, if there is one."""
    metadata = Metadata(header.metadata, where)
    _refuse_unknown(metadata)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ForerunError(f"{where}: tensor token_embd.weight is missing or has the shape {embedding}")
    if metadata.architecture in GEMMA:
        return gemma_config(metadata, shapes, rope_factors)
    if metadata.architecture in QWEN3_5:
        rotated = metadata.count("rope.dimension_count")
        return qwen3_5_config(metadata, shapes, _rope(metadata, rotated, rope_factors))
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(hidden // heads, 1))
    _check_heads(metadata, head_dim)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata, head_dim, rope_factors),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        **metadata.special_tokens(),
    }
    if metadata.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
        config |= _mistral(metadata)
    return config


def generation_config_from(header: GgufHeader) -> dict[str, Any]:
    """The ids that end an answer: end of text, end of turn, end of message; and those that never come."""
    metadata = Metadata(header.metadata, "")
    ends = [metadata.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    config = {
        "bos_token_id": metadata.token("bos_token_id"),
        "eos_token_id": sorted({end for end in ends if end is not None}),
    }
    listed = header.metadata.get("tokenizer.ggml.suppress_tokens")
    never = [*(listed if isinstance(listed, tuple) else ()), *unused_tokens(metadata)]
    return config | ({"suppress_tokens": never} if never else {})


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
    if metadata.get("expert_count") and architecture not in (*GEMMA, SPARSE):
        raise ForerunError(f"{where}: mixture-of-experts GGUF files are not read")
    if any(key.startswith("prism.hadamard") for key in metadata.values):
        raise ForerunError(f"{where}: its weights are stored rotated (prism.hadamard), which is not read")
    for key in UNREAD:
        if metadata.get(key) not in (None, 0, 0 if key == "attention.scale" else 1):
            raise ForerunError(f"{where}: metadata {architecture}.{key} changes what a model computes, and is not read")
    if metadata.get("attention.causal") is False:
        raise ForerunError(f"{where}: a model whose tokens see those behind them writes no text (attention.causal)")
    parts = metadata.values.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ForerunError(f"{where}: one of {parts} parts; join them first (llama-gguf-split --merge)")


def _check_heads(metadata: Metadata, head_dim: int) -> None:
    """Heads whose keys and values differ in size, or that are only partly rotated, are other models."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise ForerunError(
                f"{metadata.where}: {metadata.architecture}.{key} is {metadata.get(key)}, heads have {head_dim} values"
            )
    if head_dim % 2:
        raise ForerunError(f"{metadata.where}: heads of {head_dim} values cannot be rotated")


def _mistral(metadata: Metadata) -> dict[str, Any]:
    """Mistral files say "llama"; the sliding window or the name gives them away."""
    if metadata.get("attention.sliding_window"):
        window: int | None = metadata.count("attention.sliding_window")
    elif "mistral" in str(metadata.values.get("general.name", "")).lower():
        window = None
    else:
        return {}
    return {"architectures": [MISTRAL], "model_type": "mistral", "sliding_window": window}


def _rope(metadata: Metadata, head_dim: int, factors: Sequence[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    kind = metadata.get("rope.scaling.type")
    if factors is not None:
        return rope | _llama3(metadata.where, rope["rope_theta"], head_dim, factors)
    if kind == "yarn":
        original = metadata.count("rope.scaling.original_context_length")
        yarn = {"rope_type": "yarn", "factor": metadata.number("rope.scaling.factor")}
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{key}") is not None:
                yarn[name] = metadata.number(f"rope.scaling.{key}")
        return rope | yarn | {"original_max_position_embeddings": original}
    return rope | metadata.linear_scaling()


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


def huggingface_name(name: str, layers: int, where: str, architecture: str = "") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if architecture in GEMMA and (own := gemma_name(name, layers)) is not None:
        return own
    if architecture in QWEN3_5 and (own := qwen3_5_name(name, layers)) is not None:
        return own
    if stem in TOP_NAMES and kind == "weight":
        return f"{TOP_NAMES[stem]}.weight"
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES or int(match[1]) >= layers or architecture in QWEN3_5:
        raise ForerunError(f"{where}: tensor {name[:80]!r} belongs to no model that is read here")
    return f"model.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}.{match[3]}"
