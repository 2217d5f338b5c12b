"""`mistral`: a llama whose layers may slide a window over the keys, all of them or some."""

from __future__ import annotations

from forerun.models.layers.config import (
    SLIDING,
    DecoderConfig,
    attention_decoder,
    layer_count,
    layer_kinds,
    read_window,
)
from forerun.weights.config_reader import ConfigReader


def read_config(config: ConfigReader) -> DecoderConfig:
    """One window for all layers that `layer_types` does not except."""
    window, kinds = read_window(config), layer_kinds(config, [SLIDING] * layer_count(config))
    return attention_decoder(config, windows=[window if kind == SLIDING else 0 for kind in kinds])
