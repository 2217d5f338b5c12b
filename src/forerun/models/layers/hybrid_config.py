"""The shape of a hybrid decoder: recurrent layers and some with attention, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import ForerunError
from forerun.kernels.interface import DeltaLayout
from forerun.models.layers.config import DecoderConfig, head_layout, require
from forerun.models.layers.rope import rope_parameters

RECURRENT, ATTENTION = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: `top` of `count`, and one that every row goes through."""

    count: int
    top: int
    inner: int
    shared_inner: int


@dataclass(frozen=True, slots=True)
class HybridConfig(DecoderConfig):
    """Everything the hybrid decoder needs to know."""

    recurrence: DeltaLayout
    recurrent: tuple[bool, ...]  # per layer
    rotary: int  # columns of a head that are rotated
    experts: ExpertsConfig | None
    mtp_layers: int  # blocks of the head that config.json declares
    mtp_own_embedding: bool

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def delta(self) -> DeltaLayout | None:
        return self.recurrence

    @property
    def recurrent_layers(self) -> int:
        return sum(self.recurrent)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, nested beside those of a vision model or flat."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ForerunError("config.json: text_config must be an object")
    return text


def hybrid_config(
    config: Mapping[str, Any], *, defaults: Mapping[str, int], experts: ExpertsConfig | None
) -> HybridConfig:
    """The fields dense and sparse models read the same way; `defaults` for sizes a config may leave out."""
    text = {**defaults, **text_part(config)}
    refuse_variants(text)
    kinds = layer_kinds(text)
    layout = head_layout(text)
    return HybridConfig(
        family=config["model_type"],
        hidden=require(text, "hidden_size"),
        layers=len(kinds),
        layout=layout,
        intermediate=experts.inner if experts is not None else require(text, "intermediate_size"),
        vocab=require(text, "vocab_size"),
        eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=rope_parameters(text),
        # The output matrix is at the root of a checkpoint, so the root of the config has the first word.
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        context=require(text, "max_position_embeddings"),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        head_norms=True,
        windows=(0,) * len(kinds),
        recurrence=delta_layout(text),
        recurrent=tuple(kind == RECURRENT for kind in kinds),
        rotary=rotary_size(text, layout.size),
        experts=experts,
        mtp_layers=int(text.get("mtp_num_hidden_layers") or config.get("mtp_num_hidden_layers") or 0),
        mtp_own_embedding=bool(text.get("mtp_use_dedicated_embeddings", False)),
    )


def refuse_variants(text: Mapping[str, Any]) -> None:
    """Switches of these families that no published model uses."""
    expected = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "output_gate_type": ("silu", "swish"),
    }
    for name, known in expected.items():
        if text.get(name, known[0]) not in known:
            raise ForerunError(f"config.json: {name} = {text[name]!r} is not supported (only {known[0]!r})")


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """What each layer is: as listed, or else every `full_attention_interval`-th has attention."""
    layers = require(text, "num_hidden_layers")
    interval = int(text.get("full_attention_interval") or 4)
    kinds = text.get("layer_types") or [RECURRENT if (i + 1) % interval else ATTENTION for i in range(layers)]
    unknown = sorted({str(kind) for kind in kinds} - {RECURRENT, ATTENTION})
    if unknown or len(kinds) != layers or set(kinds) != {RECURRENT, ATTENTION}:
        raise ForerunError(
            f"config.json: layer_types must name {layers} layers, some {RECURRENT} and some {ATTENTION}"
            + (f"; {unknown[0]!r} is not supported" if unknown else "")
        )
    return list(kinds)


def delta_layout(text: Mapping[str, Any]) -> DeltaLayout:
    """Heads of the recurrent layers."""
    layout = DeltaLayout(
        key_heads=require(text, "linear_num_key_heads"),
        value_heads=require(text, "linear_num_value_heads"),
        key_size=require(text, "linear_key_head_dim"),
        value_size=require(text, "linear_value_head_dim"),
        window=require(text, "linear_conv_kernel_dim"),
    )
    if layout.value_heads % layout.key_heads:
        raise ForerunError(
            f"config.json: {layout.value_heads} linear value heads cannot share {layout.key_heads} key heads"
        )
    return layout


def rotary_size(text: Mapping[str, Any], size: int) -> int:
    """Rotated columns of a head of `size` columns."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    rotated = int(size * factor)
    if not 2 <= rotated <= size or rotated % 2:
        raise ForerunError(f"config.json: partial_rotary_factor {factor} does not divide heads of {size}")
    return rotated
