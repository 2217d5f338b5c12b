"""GGUF files of Gemma 3 and Gemma 4 text models, and of Gemma 4's assistants, said in Hugging Face's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.gguf_metadata import Metadata

ASSISTANT = "gemma4-assistant"
GEMMA = {"gemma3": "Gemma3ForCausalLM", "gemma4": "Gemma4ForCausalLM", ASSISTANT: "Gemma4AssistantForCausalLM"}
SHIFTED_NORMS = "gemma3"  # whose files hold the factors, 1 + w
SLIDING, FULL = "sliding_attention", "full_attention"
PATTERN = 6  # of Gemma 3: every so many layers one has no window
WIDE_QUERIES = 62  # layers of Gemma 3 27B, whose scores are scaled by hidden size and heads
NOT_ROTATED = 1e6  # factors above it slow a pair of columns down until it does not turn
TOP_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
}
# Of assistants: in clusters the vocabulary is searched faster, but no metadata says how many are looked at.
UNREAD = ("masked_embd_centroids.weight", "masked_embd_ordering", "masked_embd_ordering.weight")
LAYER_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps.weight": "experts.gate_proj",
    "ffn_up_exps.weight": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+\.\w+)")


def gemma_name(name: str, layers: int) -> str | None:
    """Hugging Face's name of a tensor that these families have and others lack, or call otherwise."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES and kind == "weight":
        return f"{TOP_NAMES[stem]}.weight"
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in LAYER_NAMES or int(match[1]) >= layers:
        return None
    return f"model.layers.{int(match[1])}.{LAYER_NAMES[match[2]]}"


def gemma_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: Sequence[float] | None
) -> dict[str, Any]:
    """The config.json of a Gemma file; `rope_factors` is the content of rope_freqs.weight, if there is one."""
    if metadata.architecture != ASSISTANT:
        return _text_config(metadata, shapes, rope_factors, f"{metadata.architecture}_text")
    return {
        "architectures": [GEMMA[ASSISTANT]],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": metadata.count("embedding_length_out"),
        "use_ordered_embeddings": False,
        "text_config": _text_config(metadata, shapes, rope_factors, "gemma4_text"),
    }


def _text_config(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], rope_factors: Sequence[float] | None, kind: str
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [GEMMA[metadata.architecture]],
        "model_type": kind,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": metadata.count("attention.head_count"),
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": False,
        "sliding_window": metadata.count("attention.sliding_window"),
        **metadata.special_tokens(),
    }
    if metadata.get("final_logit_softcapping") is not None:
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return config | (_gemma3 if metadata.architecture == "gemma3" else _gemma4)(metadata, shapes, rope_factors)


def _kinds(metadata: Metadata, layers: int) -> list[str]:
    slides = metadata.get("attention.sliding_window_pattern")
    if isinstance(slides, tuple):
        if len(slides) != layers:
            key = f"{metadata.architecture}.attention.sliding_window_pattern"
            raise ForerunError(f"{metadata.where}: metadata {key} must tell of {layers} layers")
        return [SLIDING if one else FULL for one in slides]
    pattern = metadata.count("attention.sliding_window_pattern", PATTERN)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]


def _gemma3(metadata: Metadata, _: Mapping[str, tuple[int, ...]], factors: Sequence[float] | None) -> dict[str, Any]:
    if factors is not None:
        raise ForerunError(f"{metadata.where}: rope_freqs.weight is not known of this family")
    layers, heads = metadata.count("block_count"), metadata.count("attention.head_count")
    size = metadata.count("attention.key_length", 256)
    rope = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 1e6)}
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)}
    return {
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_key_value_heads": metadata.count("attention.head_count_kv"),
        "head_dim": size,
        "layer_types": _kinds(metadata, layers),
        "query_pre_attn_scalar": metadata.count("embedding_length") // heads if layers == WIDE_QUERIES else size,
        "rope_parameters": {FULL: rope | metadata.linear_scaling(), SLIDING: local},
    }


def _gemma4(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: Sequence[float] | None
) -> dict[str, Any]:
    if metadata.linear_scaling():
        raise ForerunError(f"{metadata.where}: rope scaling is not known of this family")
    layers = metadata.count("block_count")
    kinds = _kinds(metadata, layers)
    heads = metadata.counts("attention.head_count_kv", layers)
    sizes = {FULL: metadata.count("attention.key_length")}
    sizes[SLIDING] = metadata.count("attention.key_length_swa", sizes[FULL])
    shared = metadata.get("attention.shared_kv_layers") or 0
    inner = metadata.counts("feed_forward_length", layers)
    least, most = (layers, layers) if metadata.architecture == ASSISTANT else (0, layers - 1)
    if not isinstance(shared, int) or not least <= shared <= most:
        raise metadata.senseless("attention.shared_kv_layers")
    own = layers - shared
    double = bool(shared) and inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * own + [inner[0] * (2 if double else 1)] * shared:
        raise ForerunError(f"{metadata.where}: networks of such sizes are not read ({inner[:8]} …)")
    wide = [layer for layer in range(own) if kinds[layer] == FULL]
    turned = 1.0 if factors is None else sum(factor < NOT_ROTATED for factor in factors) / len(factors)
    size = metadata.get("embedding_length_per_layer_input") or 0
    table = shapes.get("per_layer_token_embd.weight", ())
    if size and len(table) != 2:
        raise ForerunError(f"{metadata.where}: tensor per_layer_token_embd.weight is missing or has the shape {table}")
    rope = {"rope_type": "proportional", "rope_theta": metadata.number("rope.freq_base", 1e6)}
    return {
        "intermediate_size": inner[0],
        "use_double_wide_mlp": double,
        "layer_types": kinds,
        "head_dim": sizes[SLIDING],
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": sizes[kinds[layer]], "num_key_value_heads": heads[layer]}
            for layer in range(layers)
        },
        "attention_k_eq_v": bool(wide) and not any(f"blk.{layer}.attn_v.weight" in shapes for layer in wide),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": table[0] if size else None,
        "rope_parameters": {
            FULL: {**rope, "partial_rotary_factor": turned},
            SLIDING: {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
        },
        **_experts(metadata),
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.get("expert_count"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.count("expert_count"),
        "top_k_experts": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
    }
