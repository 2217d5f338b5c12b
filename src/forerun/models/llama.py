"""`llama`: the plain decoder."""

from __future__ import annotations

from forerun.models.layers.config import FULL, DecoderConfig, attention_decoder, layer_count
from forerun.weights.config_reader import ConfigReader


def read_config(config: ConfigReader) -> DecoderConfig:
    """Optional biases on the attention projections and on the feed-forward layer; no window."""
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    layers = layer_count(config)
    config.only("layer_types", None, [FULL] * layers)
    return attention_decoder(config, windows=[0] * layers, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
