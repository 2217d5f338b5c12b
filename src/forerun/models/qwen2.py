"""`qwen2`: biases on queries, keys and values; an optional window on the upper layers."""

from __future__ import annotations

from forerun.models.layers.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    attention_decoder,
    layer_count,
    layer_kinds,
    read_window,
)
from forerun.weights.config_reader import ConfigReader


def windows(config: ConfigReader) -> list[int]:
    """The window counts only when `use_sliding_window` is set: where `layer_types` says so, or in the upper layers."""
    layers = layer_count(config)
    if not config.flag("use_sliding_window", False):
        return [0] * layers
    window = read_window(config)
    first = config.integer("max_window_layers", 28, low=0)
    kinds = layer_kinds(config, [SLIDING if layer >= first else FULL for layer in range(layers)])
    return [window if kind == SLIDING else 0 for kind in kinds]


def read_config(config: ConfigReader) -> DecoderConfig:
    """As llama, with biases on the fused projection."""
    return attention_decoder(config, windows=windows(config), qkv_bias=True)
