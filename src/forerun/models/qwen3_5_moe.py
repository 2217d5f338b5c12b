"""`qwen3_5_moe` and `qwen3_5_moe_text`: as `qwen3_5`, with experts in every feed-forward layer."""

from __future__ import annotations

from forerun.errors import ForerunError
from forerun.models.layers.config import DecoderConfig, ExpertsConfig
from forerun.models.qwen3_5 import hybrid_decoder, text_part
from forerun.weights.config_reader import ConfigReader


def read_config(config: ConfigReader) -> DecoderConfig:
    """The weights of the chosen experts always add up to one in this family."""
    text = text_part(config)
    experts = ExpertsConfig(
        count=text.integer("num_experts", 256),
        top=text.integer("num_experts_per_tok", 8),
        inner=text.integer("moe_intermediate_size", 512),
        shared_inner=text.integer("shared_expert_intermediate_size", 512),
    )
    if experts.top > experts.count:
        raise ForerunError(
            f"{text.name('num_experts_per_tok')} is {experts.top}, but there are {experts.count} experts"
        )
    return hybrid_decoder(config, experts)
