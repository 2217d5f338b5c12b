"""`qwen3_5_moe` and `qwen3_5_moe_text`: as `qwen3_5`, with experts in every feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import ForerunError
from forerun.models.layers.config import require
from forerun.models.layers.hybrid_config import ExpertsConfig, HybridConfig, hybrid_config, text_part
from forerun.models.qwen3_5 import DEFAULTS

SPARSE_DEFAULTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def read_config(config: Mapping[str, Any]) -> HybridConfig:
    """The weights of the chosen experts always add up to one in this family."""
    text = {**SPARSE_DEFAULTS, **text_part(config)}
    experts = ExpertsConfig(
        count=require(text, "num_experts"),
        top=require(text, "num_experts_per_tok"),
        inner=require(text, "moe_intermediate_size"),
        shared_inner=require(text, "shared_expert_intermediate_size"),
    )
    if experts.top > experts.count:
        raise ForerunError(f"config.json: {experts.top} experts per token, but only {experts.count} experts")
    return hybrid_config(config, defaults=DEFAULTS, experts=experts)
