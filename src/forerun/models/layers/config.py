"""What a decoder looks like: a list of layers, each a mixer and a feed-forward network. Families' files write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import ForerunError
from forerun.kernels.interface import Activation, AttentionSpec, DeltaLayout, HeadLayout
from forerun.models.layers.rope import RopeConfig
from forerun.weights.config_reader import ConfigReader

MOST_LAYERS = 4096
MOST_POSITIONS = 2**31 - 1  # they are counted in 32 bits on a device
LARGEST_HEAD = 1 << 16
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One attention layer."""

    spec: AttentionSpec
    rope: RopeConfig
    source: int | None = None  # the layer whose keys and values it reads; None: it has its own
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # of each head's queries and keys
    value_norms: bool = False  # of each head's values, without weights
    values_are_keys: bool = False  # values come from the projection of keys, before its norm
    gated: bool = False  # each head's output is multiplied by a gate, stored behind its queries


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One gated network: activation(gate) · up, then down."""

    inner: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: `top` of `count` for each row."""

    count: int
    top: int
    inner: int
    shared_inner: int = 0  # of one that every row goes through, where they stand in the place of a dense network
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A mixer between rows and a network for each row; the gated delta rule is described by its layout alone."""

    mixer: AttentionConfig | DeltaLayout
    feed_forward: DenseConfig | ExpertsConfig
    beside: ExpertsConfig | None = None  # the dense network, for rows with norms and a router of their own


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """A small input of its own for every layer, from the token and from its embedding."""

    size: int  # columns of each layer's
    vocab: int  # rows of the table it comes from


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the decoder needs to know."""

    family: str
    hidden: int
    vocab: int
    context: int
    eps: float
    tied: bool  # the output matrix is the embedding
    layers: tuple[LayerConfig, ...]
    zero_centred_norms: bool = False  # files hold w where the factor is 1 + w
    sandwich_norms: bool = False  # what a mixer or a network gives is normed too, before it is added
    embedding_scale: float = 1.0  # that embeddings are multiplied by
    softcap: float = 0.0  # logits become softcap · tanh(logit / softcap); 0 leaves them as they are
    layer_scalars: bool = False  # rows are multiplied by a number after each layer
    per_layer: PerLayerConfig | None = None
    never: tuple[int, ...] = ()  # tokens that stand for media: the model does not write them
    prefixes: tuple[str, ...] = ("model.",)  # of tensor names: the first that fits
    towers: tuple[str, ...] = ()  # beginnings of names of what turns media into rows: read when media come
    ignored: tuple[str, ...] = ()  # beginnings of names that the decoder does not read: a head
    mtp_layers: int = 0  # blocks of the native head that config.json declares
    mtp_own_embedding: bool = False

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that keep keys and values, in the order of their pages."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.spec for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.source is None)

    @property
    def ropes(self) -> set[RopeConfig]:
        """The ways in which heads are turned."""
        return {layer.mixer.rope for layer in self.layers if isinstance(layer.mixer, AttentionConfig)}

    @property
    def layout(self) -> HeadLayout:
        """The shape of keys and values, the same in all layers."""
        return self.attention[0].layout

    @property
    def delta(self) -> DeltaLayout | None:
        """The shape of recurrent layers, in families that have them."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaLayout)), None)

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a recurrent state."""
        return sum(isinstance(layer.mixer, DeltaLayout) for layer in self.layers)

    def state_index(self, layer: int) -> int:
        """Where a layer's state is among those of its kind: in the list of pages, or of recurrent states."""
        mixer = self.layers[layer].mixer
        if isinstance(mixer, DeltaLayout):
            return sum(isinstance(before.mixer, DeltaLayout) for before in self.layers[:layer])
        before = self.layers[: layer if mixer.source is None else mixer.source]
        return sum(isinstance(each.mixer, AttentionConfig) and each.mixer.source is None for each in before)


def layer_count(config: ConfigReader) -> int:
    """How many layers there are."""
    return config.integer("num_hidden_layers", high=MOST_LAYERS)


def layer_kinds(config: ConfigReader, usual: Sequence[str], other: str = SLIDING) -> list[str]:
    """Full attention or the `other` kind, as `layer_types` lists them; or else as is `usual`."""
    kinds = config.texts("layer_types") or list(usual)
    unknown = sorted(set(kinds) - {other, FULL})
    if unknown or len(kinds) != len(usual):
        found = f"{unknown[0][:40]!r}" if unknown else f"{len(kinds)} of them"
        raise ForerunError(
            f"{config.name('layer_types')} must name {len(usual)} layers, each {other} or {FULL}, found {found}"
        )
    return kinds


def kinds_in_turn(config: ConfigReader, every: int, other: str = SLIDING) -> list[str]:
    """As `layer_kinds`, where usually every so many layers one has full attention."""
    return layer_kinds(config, [other if (i + 1) % every else FULL for i in range(layer_count(config))], other)


def head_layout(config: ConfigReader, head_dim: int | None = None) -> HeadLayout:
    """Heads as configured; a missing `head_dim` is the family's, or else hidden / heads."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    size = config.integer("head_dim", head_dim or config.integer("hidden_size") // heads, high=LARGEST_HEAD)
    if heads % kv_heads:
        raise ForerunError(
            f"{config.name('num_key_value_heads')}: {heads} heads cannot share {kv_heads} key/value heads"
        )
    return HeadLayout(heads, kv_heads, size)


def read_eps(config: ConfigReader) -> float:
    """What norms add before they divide."""
    return config.number("rms_norm_eps", 1e-6, high=1.0)


def read_experts(config: ConfigReader, top: str, **more: Any) -> ExpertsConfig:
    """A mixture of experts; `top` is the key that says how many each row goes through."""
    count, chosen = config.integer("num_experts"), config.integer(top)
    if chosen > count:
        raise ForerunError(f"{config.name(top)} is {chosen}, but there are {count} experts")
    return ExpertsConfig(count, chosen, config.integer("moe_intermediate_size"), **more)


def decoder_config(
    config: ConfigReader, text: ConfigReader, layers: Sequence[LayerConfig], *, tied: bool = False, **more: Any
) -> DecoderConfig:
    """What all families say in the same words; `text` has the settings of the language model, `tied` is the usual."""
    return DecoderConfig(
        family=config.text("model_type"),
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        context=text.integer("max_position_embeddings", high=MOST_POSITIONS),
        eps=read_eps(text),
        # The output matrix is at the root of a checkpoint, so the root of the config has the first word.
        tied=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", tied)),
        layers=tuple(layers),
        **more,
    )
