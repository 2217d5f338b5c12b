"""`qwen3_5` and `qwen3_5_moe`: gated delta rule layers, with gated attention after every three.

Both come nested beside a vision model's settings, or flat (`qwen3_5_text`, `qwen3_5_moe_text`).
"""

from __future__ import annotations

from dataclasses import replace

from forerun.errors import ForerunError
from forerun.kernels.interface import AttentionSpec, DeltaLayout
from forerun.models.layers.config import (
    FULL,
    LARGEST_HEAD,
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    ExpertsConfig,
    LayerConfig,
    decoder_config,
    head_layout,
    kinds_in_turn,
    read_experts,
)
from forerun.models.layers.rope import read_rope, rope_part
from forerun.weights.config_reader import ConfigReader

RECURRENT = "linear_attention"
# What absent fields mean in this family.
USUAL = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
}
SPARSE_USUAL = USUAL | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# What stands for media in a prompt, and the usual ids.
MEDIA = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def read_dense(config: ConfigReader) -> DecoderConfig:
    """One dense network in every layer."""
    text = config.text_model(USUAL)
    return hybrid_decoder(config, text, DenseConfig(text.integer("intermediate_size")))


def read_sparse(config: ConfigReader) -> DecoderConfig:
    """Experts in every layer; the weights of those chosen for a row always add up to one."""
    text = config.text_model(SPARSE_USUAL)
    shared = text.integer("shared_expert_intermediate_size")
    return hybrid_decoder(config, text, read_experts(text, "num_experts_per_tok", shared_inner=shared))


def hybrid_decoder(
    config: ConfigReader, text: ConfigReader, feed_forward: DenseConfig | ExpertsConfig
) -> DecoderConfig:
    """What both have in common; `text`: the settings of the language model."""
    text.only("hidden_act", "silu")
    text.only("attention_bias", False)
    text.only("attn_output_gate", True)
    text.only("output_gate_type", "silu", "swish")
    layout = head_layout(text)
    rope = replace(read_rope(text, rotary_size(text, layout.size), partial=True), mrope_section=mrope_section(text))
    mixers: dict[str, AttentionConfig | DeltaLayout] = {
        RECURRENT: delta_layout(text),
        FULL: AttentionConfig(AttentionSpec(layout), rope, head_norms=True, gated=True),
    }
    kinds = kinds_in_turn(text, text.integer("full_attention_interval"), RECURRENT)
    if len(set(kinds)) < 2:
        raise ForerunError(f"{text.name('layer_types')} must name some {RECURRENT} and some {FULL} layers")
    return decoder_config(
        config,
        text,
        [LayerConfig(mixers[kind], feed_forward) for kind in kinds],
        zero_centred_norms=True,
        never=tuple(config.integer(*usual, low=0) for usual in MEDIA.items()) if "vision_config" in config else (),
        prefixes=("model.language_model.", "model."),  # beside a vision model, or alone
        towers=("model.visual.", "visual."),
        ignored=("mtp.",),
        mtp_layers=text.integer("mtp_num_hidden_layers", config.integer("mtp_num_hidden_layers", 0, low=0), low=0),
        mtp_own_embedding=text.flag("mtp_use_dedicated_embeddings", False),
    )


def delta_layout(text: ConfigReader) -> DeltaLayout:
    """Heads of the recurrent layers."""
    layout = DeltaLayout(
        key_heads=text.integer("linear_num_key_heads"),
        value_heads=text.integer("linear_num_value_heads"),
        key_size=text.integer("linear_key_head_dim"),
        value_size=text.integer("linear_value_head_dim"),
        window=text.integer("linear_conv_kernel_dim"),
    )
    if layout.value_heads % layout.key_heads:
        name = text.name("linear_num_value_heads")
        raise ForerunError(f"{name}: {layout.value_heads} value heads cannot share {layout.key_heads} key heads")
    return layout


def mrope_section(text: ConfigReader) -> tuple[int, ...]:
    """Pairs of columns that turn with time, height and width."""
    rope = rope_part(text)
    sections = rope.integers("mrope_section", (11, 11, 10), high=LARGEST_HEAD)
    if len(sections) != 3:
        raise rope.wrong("mrope_section", "a list of three numbers")
    rope.only("mrope_interleaved", True)
    return tuple(sections)


def rotary_size(text: ConfigReader, size: int) -> int:
    """Rotated columns of a head of `size` columns."""
    usual = text.number("partial_rotary_factor", 0.25, high=1.0)
    return int(size * rope_part(text).number("partial_rotary_factor", usual, high=1.0))
