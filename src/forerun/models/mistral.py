"""`mistral`: a llama whose every layer may slide a window over the keys."""

from __future__ import annotations

from forerun.models.layers.config import MOST_POSITIONS, DecoderConfig, attention_decoder, layer_count
from forerun.weights.config_reader import ConfigReader

DEFAULT_WINDOW = 4096  # what an absent field means in this family; null means none


def read_config(config: ConfigReader) -> DecoderConfig:
    """One window for all layers."""
    default = 0 if "sliding_window" in config.values else DEFAULT_WINDOW
    window = config.integer("sliding_window", default, low=0, high=MOST_POSITIONS)
    return attention_decoder(config, windows=[window] * layer_count(config))
