"""The shape of a decoder, read from config.json by each family's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import ForerunError
from forerun.kernels.interface import DeltaLayout, HeadLayout


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the shared decoder needs to know."""

    family: str
    hidden: int
    layers: int
    layout: HeadLayout
    intermediate: int
    vocab: int
    eps: float
    rope: Mapping[str, Any]
    tied: bool
    context: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int, ...]  # per layer; 0 = all keys

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.layers

    @property
    def delta(self) -> DeltaLayout | None:
        """The shape of recurrent layers, in families that have them."""
        return None

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return 0


def require(config: Mapping[str, Any], name: str) -> int:
    """A positive integer that config.json must hold."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ForerunError(f"config.json: {name} must be a positive integer, found {value!r}")
    return value


def head_layout(config: Mapping[str, Any]) -> HeadLayout:
    """Heads as configured; `head_dim` wins over hidden / heads."""
    heads = require(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or require(config, "hidden_size") // heads
    if heads % kv_heads:
        raise ForerunError(f"config.json: {heads} attention heads cannot share {kv_heads} key/value heads")
    return HeadLayout(heads, kv_heads, size)


def decoder_config(
    config: Mapping[str, Any],
    *,
    windows: tuple[int, ...],
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> DecoderConfig:
    """The fields all families read the same way."""
    from forerun.models.layers.rope import rope_parameters

    if config.get("hidden_act", "silu") != "silu":
        raise ForerunError(
            f"activation {config['hidden_act']!r} is not supported for {config['model_type']} (only silu)"
        )
    return DecoderConfig(
        family=config["model_type"],
        hidden=require(config, "hidden_size"),
        layers=require(config, "num_hidden_layers"),
        layout=head_layout(config),
        intermediate=require(config, "intermediate_size"),
        vocab=require(config, "vocab_size"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_parameters(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=require(config, "max_position_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        head_norms=head_norms,
        windows=windows,
    )


def layer_windows(config: Mapping[str, Any], default_first: int) -> tuple[int, ...]:
    """Sliding windows where `layer_types` says so, or else from layer `default_first` on."""
    window = config.get("sliding_window") or 0
    layers = require(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])
    return tuple(window if layer >= default_first else 0 for layer in range(layers))
