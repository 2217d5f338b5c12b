"""`qwen3_5_moe` and `qwen3_5_moe_text`: as `qwen3_5`, with experts in every feed-forward layer."""

from __future__ import annotations

from forerun.errors import ForerunError
from forerun.models import qwen3_5
from forerun.models.layers.config import DecoderConfig, ExpertsConfig
from forerun.weights.config_reader import ConfigReader

# What absent fields mean in this family.
USUAL = qwen3_5.USUAL | {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def read_config(config: ConfigReader) -> DecoderConfig:
    """The weights of the chosen experts always add up to one in this family."""
    text = config.text_model(USUAL)
    experts = ExpertsConfig(
        count=text.integer("num_experts"),
        top=text.integer("num_experts_per_tok"),
        inner=text.integer("moe_intermediate_size"),
        shared_inner=text.integer("shared_expert_intermediate_size"),
    )
    if experts.top > experts.count:
        raise ForerunError(
            f"{text.name('num_experts_per_tok')} is {experts.top}, but there are {experts.count} experts"
        )
    return qwen3_5.hybrid_decoder(config, text, experts)
