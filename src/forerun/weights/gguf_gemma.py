"""GGUF files of Gemma 3 and Gemma 4 text models, and of Gemma 4's assistants, said in Hugging Face's words."""

from __future__ import annotations

from collections.abc import Sequence
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
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "nextn.pre_projection.weight": "pre_projection.weight",
    "nextn.post_projection.weight": "post_projection.weight",
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


def gemma_config(metadata: Metadata, factors: Sequence[float] | None) -> dict[str, Any]:
    """The config.json of a Gemma file; `factors` is the content of rope_freqs.weight, if there is one."""
    if metadata.architecture != ASSISTANT:
        return _text_config(metadata, factors) | {"model_type": f"{metadata.architecture}_text"}
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": metadata.integer("embedding_length_out"),
        "use_ordered_embeddings": False,
        "text_config": _text_config(metadata, factors) | {"model_type": "gemma4_text"},
    }


def _text_config(metadata: Metadata, factors: Sequence[float] | None) -> dict[str, Any]:
    config = metadata.common_config() | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": metadata.integer("attention.sliding_window"),
    }
    if "final_logit_softcapping" in metadata:
        config["final_logit_softcapping"] = metadata.decimal("final_logit_softcapping")
    return config | (_gemma3 if metadata.architecture == "gemma3" else _gemma4)(metadata, factors)


def _kinds(metadata: Metadata, layers: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    slides = metadata.values.get(key)
    if isinstance(slides, tuple):
        if len(slides) != layers:
            raise ForerunError(f"{metadata.name(key)} must tell of {layers} layers")
        return [SLIDING if one else FULL for one in slides]
    pattern = metadata.integer(key, PATTERN)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]


def _gemma3(metadata: Metadata, factors: Sequence[float] | None) -> dict[str, Any]:
    if factors is not None:
        raise ForerunError(f"{metadata.where}: rope_freqs.weight is not known of this family")
    layers, heads = metadata.integer("block_count"), metadata.integer("attention.head_count")
    size = metadata.integer("attention.key_length", 256)
    rope = {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base", 1e6)}
    local = {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base_swa", 1e4)}
    return {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_key_value_heads": metadata.integer("attention.head_count_kv"),
        "head_dim": size,
        "layer_types": _kinds(metadata, layers),
        "query_pre_attn_scalar": metadata.integer("embedding_length") // heads if layers == WIDE_QUERIES else size,
        "rope_parameters": {FULL: rope | metadata.linear_scaling(), SLIDING: local},
    }


def _gemma4(metadata: Metadata, factors: Sequence[float] | None) -> dict[str, Any]:
    if metadata.linear_scaling():
        raise ForerunError(f"{metadata.where}: rope scaling is not known of this family")
    layers = metadata.integer("block_count")
    kinds = _kinds(metadata, layers)
    heads = metadata.counts("attention.head_count_kv", layers)
    sizes = {FULL: metadata.integer("attention.key_length")}
    sizes[SLIDING] = metadata.integer("attention.key_length_swa", sizes[FULL])
    inner = metadata.counts("feed_forward_length", layers)
    least, most = (layers, layers) if metadata.architecture == ASSISTANT else (0, layers - 1)
    shared = metadata.integer("attention.shared_kv_layers", 0, low=least, high=most)
    own = layers - shared
    double = bool(shared) and inner[-1] == 2 * inner[0]
    if inner != [inner[0]] * own + [inner[0] * (2 if double else 1)] * shared:
        raise ForerunError(f"{metadata.where}: networks of such sizes are not read ({inner[:8]} …)")
    wide = [layer for layer in range(own) if kinds[layer] == FULL]
    turned = 1.0 if factors is None else sum(factor < NOT_ROTATED for factor in factors) / len(factors)
    size = metadata.integer("embedding_length_per_layer_input", 0, low=0)
    table = metadata.shapes.get("per_layer_token_embd.weight", ())
    if size and len(table) != 2:
        raise ForerunError(f"{metadata.where}: tensor per_layer_token_embd.weight is missing or has the shape {table}")
    rope = {"rope_type": "proportional", "rope_theta": metadata.decimal("rope.freq_base", 1e6)}
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
        "attention_k_eq_v": bool(wide) and not any(f"blk.{layer}.attn_v.weight" in metadata.shapes for layer in wide),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": table[0] if size else None,
        "rope_parameters": {
            FULL: {**rope, "partial_rotary_factor": turned},
            SLIDING: {"rope_type": "default", "rope_theta": metadata.decimal("rope.freq_base_swa", 1e4)},
        },
        **_experts(metadata),
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    if not metadata.integer("expert_count", 0, low=0):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.integer("expert_count"),
        "top_k_experts": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }
