"""`qwen3_5` and `qwen3_5_text`: gated delta rule layers, with gated attention after every three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.layers.hybrid_config import HybridConfig, hybrid_config

DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def read_config(config: Mapping[str, Any]) -> HybridConfig:
    """Nested beside a vision model's settings, or flat."""
    return hybrid_config(config, defaults=DEFAULTS, experts=None)
