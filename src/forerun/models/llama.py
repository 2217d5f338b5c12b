"""`llama`, `mistral`, `qwen2` and `qwen3`: one kind of layer, with and without windows, biases and norms of heads."""

from __future__ import annotations

from typing import Any

from forerun.kernels.interface import AttentionSpec
from forerun.models.layers.config import (
    FULL,
    MOST_POSITIONS,
    SLIDING,
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    LayerConfig,
    decoder_config,
    head_layout,
    layer_count,
    layer_kinds,
)
from forerun.models.layers.rope import read_rope
from forerun.weights.config_reader import ConfigReader

QWEN3_HEAD = 128  # columns of a head where a `qwen3` does not say


def read_llama(config: ConfigReader) -> DecoderConfig:
    """Optional biases on the attention projections and on the feed-forward layer; no window."""
    config.only("layer_types", None, [FULL] * layer_count(config))
    bias = config.flag("attention_bias", False)
    return _decoder(config, 0, mlp_bias=config.flag("mlp_bias", False), qkv_bias=bias, output_bias=bias)


def read_mistral(config: ConfigReader) -> DecoderConfig:
    """One window for all layers that `layer_types` does not except."""
    return _decoder(config, _window(config))


def read_qwen2(config: ConfigReader) -> DecoderConfig:
    """Biases on queries, keys and values; an optional window on the upper layers."""
    return _qwen(config, qkv_bias=True)


def read_qwen3(config: ConfigReader) -> DecoderConfig:
    """As `qwen2`, with norms of each head's queries and keys, and biases only where asked for."""
    bias = config.flag("attention_bias", False)
    return _qwen(config, QWEN3_HEAD, qkv_bias=bias, output_bias=bias, head_norms=True)


def _qwen(config: ConfigReader, head_dim: int | None = None, **mixer: Any) -> DecoderConfig:
    """The window counts only when `use_sliding_window` is set: where `layer_types` says so, or in the upper layers."""
    window = _window(config) if config.flag("use_sliding_window", False) else 0
    return _decoder(config, window, config.integer("max_window_layers", 28, low=0), head_dim=head_dim, **mixer)


def _window(config: ConfigReader) -> int:
    """Keys that a layer with a window sees; null means that none has one, absence that they are as many as usual."""
    default = 0 if "sliding_window" in config.values else 4096
    return config.integer("sliding_window", default, low=0, high=MOST_POSITIONS)


def _decoder(
    config: ConfigReader,
    window: int,
    first: int = 0,
    *,
    head_dim: int | None = None,
    mlp_bias: bool = False,
    **mixer: Any,
) -> DecoderConfig:
    """A window (0: none) for the layers that `layer_types` gives one, or else for layer `first` and those above it."""
    config.only("hidden_act", "silu")
    layout = head_layout(config, head_dim)
    rope = read_rope(config, layout.size)
    feed_forward = DenseConfig(config.integer("intermediate_size"), mlp_bias)
    kinds = layer_kinds(config, [SLIDING if layer >= first else FULL for layer in range(layer_count(config))])
    mixers = {
        kind: AttentionConfig(AttentionSpec(layout, window if kind == SLIDING else 0), rope, **mixer) for kind in kinds
    }
    return decoder_config(config, config, [LayerConfig(mixers[kind], feed_forward) for kind in kinds])
