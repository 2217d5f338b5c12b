"""`qwen3`: norms on each query and key head, no biases unless asked for."""

from __future__ import annotations

from forerun.models.layers.config import DecoderConfig, attention_decoder
from forerun.models.qwen2 import windows
from forerun.weights.config_reader import ConfigReader

HEAD_DIM = 128  # what an absent field means in this family


def read_config(config: ConfigReader) -> DecoderConfig:
    """As qwen2, with norms in place of biases."""
    bias = config.flag("attention_bias", False)
    return attention_decoder(
        config, windows=windows(config), head_dim=HEAD_DIM, qkv_bias=bias, output_bias=bias, head_norms=True
    )
