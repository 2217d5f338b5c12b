"""`gemma3` and `gemma3_text`: norms on both sides of every part, windows in five of six layers."""

from __future__ import annotations

from forerun.kernels.interface import AttentionSpec
from forerun.models.layers.config import (
    FULL,
    MOST_POSITIONS,
    SLIDING,
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    LayerConfig,
    decoder_config,
    head_layout,
    kinds_in_turn,
)
from forerun.models.layers.rope import RopeConfig, read_rope_settings, rope_part
from forerun.weights.config_reader import ConfigReader

# What absent fields mean in this family; the config.json of the 4B leaves most of them out.
USUAL = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
}
THETA, LOCAL_THETA = 1e6, 1e4
PREFIXES = ("model.language_model.", "language_model.model.", "model.")  # beside a tower, new and old, or alone
TOWERS = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")
MEDIA = {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000}


def read_config(config: ConfigReader) -> DecoderConfig:
    """Nested beside the settings of a tower, or flat."""
    text = config.text_model(USUAL)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("use_bidirectional_attention", False)
    text.only("attn_logit_softcapping", None)
    bias = text.flag("attention_bias", False)
    layout = head_layout(text)
    window = text.integer("sliding_window", high=MOST_POSITIONS)
    scale = text.number("query_pre_attn_scalar") ** -0.5
    mixers = {
        kind: AttentionConfig(
            AttentionSpec(layout, window if kind == SLIDING else 0, scale),
            layer_rope(text, kind, layout.size),
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
        )
        for kind in (SLIDING, FULL)
    }
    kinds = kinds_in_turn(text, text.integer("sliding_window_pattern"))
    network = DenseConfig(text.integer("intermediate_size"), activation="gelu_tanh")
    return decoder_config(
        config,
        text,
        [LayerConfig(mixers[kind], network) for kind in kinds],
        tied=True,
        zero_centred_norms=True,
        sandwich_norms=True,
        embedding_scale=text.integer("hidden_size") ** 0.5,
        softcap=text.number("final_logit_softcapping") if "final_logit_softcapping" in text else 0.0,
        never=tuple(config.integer(*entry, low=0) for entry in MEDIA.items()) if "text_config" in config else (),
        prefixes=PREFIXES,
        ignored=TOWERS,
    )


def layer_rope(text: ConfigReader, kind: str, size: int) -> RopeConfig:
    """By kind of layer in new configs; old ones scale the layers without a window alone."""
    local = text.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    theta = local if kind == SLIDING else text.number("rope_theta", THETA, above=1.0)
    parameters = rope_part(text)
    if SLIDING in parameters or FULL in parameters:
        return read_rope_settings(text, parameters.part(kind), size, theta)
    if text.part("rope_parameters").values:
        raise text.wrong("rope_parameters", f"settings of {SLIDING} and of {FULL}")
    return RopeConfig(size, local) if kind == SLIDING else read_rope_settings(text, parameters, size, theta)
