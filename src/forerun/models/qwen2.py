"""`qwen2`: biases on queries, keys and values; an optional window on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.layers.config import DecoderConfig, decoder_config, layer_windows, require


def windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The window counts only when `use_sliding_window` is set."""
    if not config.get("use_sliding_window", False):
        return (0,) * require(config, "num_hidden_layers")
    return layer_windows(config, config.get("max_window_layers", 28))


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """As llama, with biases on the fused projection."""
    return decoder_config(config, windows=windows(config), qkv_bias=True)
