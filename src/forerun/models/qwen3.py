"""`qwen3`: norms on each query and key head, no biases unless asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.layers.config import DecoderConfig, decoder_config
from forerun.models.qwen2 import windows


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """As qwen2, with q/k norms; `head_dim` defaults to 128 in this family."""
    bias = bool(config.get("attention_bias", False))
    config = {"head_dim": 128, **config}
    return decoder_config(config, windows=windows(config), qkv_bias=bias, output_bias=bias, head_norms=True)
