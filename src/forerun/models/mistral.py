"""`mistral`: a llama whose every layer may slide a window over the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.models.layers.config import DecoderConfig, decoder_config, require

DEFAULT_WINDOW = 4096  # what an absent field means in this family; null means none


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """One window for all layers."""
    window = config.get("sliding_window", DEFAULT_WINDOW) or 0
    return decoder_config(config, windows=(window,) * require(config, "num_hidden_layers"))
