"""`llama`: the plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.layers.config import DecoderConfig, decoder_config, require


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Optional biases on the attention projections and on the feed-forward layer; no window."""
    bias = bool(config.get("attention_bias", False))
    windows = (0,) * require(config, "num_hidden_layers")
    mlp_bias = bool(config.get("mlp_bias", False))
    return decoder_config(config, windows=windows, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
