"""`gemma4` and `gemma4_unified`, alone or beside their towers: windows in most layers, and four variants of a layer.

E2B and E4B have per-layer embeddings and let their upper layers read the keys and values of lower ones; 26B-A4B has
experts beside every dense network; where `attention_k_eq_v` is set, layers without a window take values from the
projection of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.kernels.interface import AttentionSpec, HeadLayout
from forerun.models.layers.config import (
    FULL,
    LARGEST_HEAD,
    MOST_POSITIONS,
    SLIDING,
    AttentionConfig,
    BesideConfig,
    DecoderConfig,
    DenseConfig,
    LayerConfig,
    PerLayerConfig,
    layer_count,
    layer_kinds,
    read_context,
    read_eps,
)
from forerun.models.layers.rope import RopeConfig, read_rope_settings, rope_part
from forerun.weights.config_reader import ConfigReader

PREFIXES = ("model.language_model.", "model.")  # beside towers, or alone
TOWERS = ("vision_tower.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.")
# What absent fields mean in this family.
USUAL = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
}
UNIFIED_USUAL = USUAL | {"max_position_embeddings": 262144, "sliding_window": 1024}
PATTERN = 6  # where `layer_types` is absent, every so many layers one has no window
CHANGEABLE = ("head_dim", "num_key_value_heads")  # what `per_layer_config` may say of a layer
# What stands for media in a prompt, and the usual ids.
MEDIA = {
    "image_token_id": 258880,
    "audio_token_id": 258881,
    "video_token_id": 258884,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "boa_token_id": 256000,
    "eoa_token_index": 258883,
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of one layer, as the config has them."""

    kind: str
    heads: HeadLayout
    window: int
    rope: RopeConfig


def read_config(config: ConfigReader) -> DecoderConfig:
    """Nested beside the settings of towers, or flat."""
    unified, text = is_unified(config), text_model(config)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("attention_bias", False)
    text.only("use_bidirectional_attention", None, "vision")
    shapes, shared = layer_shapes(text), text.integer("num_kv_shared_layers", 0, low=0)
    first = len(shapes) - shared  # that reads the keys and values of another
    sources = {kind: last_of_kind(shapes[: max(0, first)], kind, text) for kind in {s.kind for s in shapes[first:]}}
    for index in range(first, len(shapes)):
        source = shapes[sources[shapes[index].kind]].heads
        if source.size != shapes[index].heads.size or shapes[index].heads.heads % source.kv_heads:
            raise ForerunError(f"{text.name('num_kv_shared_layers')}: layer {index} cannot read the keys of its kind")
    usual = 256 if "hidden_size_per_layer_input" not in text.values else 0  # null means none, absence does not
    size = 0 if unified else text.integer("hidden_size_per_layer_input", usual, low=0)
    hidden = text.integer("hidden_size")
    return DecoderConfig(
        family=config.text("model_type"),
        hidden=hidden,
        vocab=text.integer("vocab_size"),
        context=read_context(text),
        eps=read_eps(text),
        tied=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True)),
        layers=tuple(
            LayerConfig(
                attention(shape, sources.get(shape.kind) if index >= first else None, text),
                network(text, index >= first > 0),
                None if unified else experts(text),
            )
            for index, shape in enumerate(shapes)
        ),
        sandwich_norms=True,
        embedding_scale=hidden**0.5,
        softcap=text.number("final_logit_softcapping") if "final_logit_softcapping" in text else 0.0,
        layer_scalars=True,
        per_layer=PerLayerConfig(size, text.integer("vocab_size_per_layer_input")) if size else None,
        never=media_tokens(config) if "text_config" in config else (),
        prefixes=PREFIXES,
        towers=tuple(f"model.{tower}" for tower in TOWERS),
        ignored=ignored(range(first, len(shapes))),
    )


def is_unified(config: ConfigReader) -> bool:
    """A model without towers, or its assistant: what the language model says of itself has the first word."""
    return config.text_model().text("model_type", config.text("model_type")).startswith("gemma4_unified")


def text_model(config: ConfigReader) -> ConfigReader:
    """The settings of the language model, absent ones filled in."""
    return config.text_model(UNIFIED_USUAL if is_unified(config) else USUAL)


def layer_shapes(text: ConfigReader) -> list[LayerShape]:
    """Heads, window and rotation of every layer."""
    usual = [SLIDING if (index + 1) % PATTERN else FULL for index in range(layer_count(text))]
    kinds = [*layer_kinds(text, usual)[:-1], FULL]  # whatever is listed
    window = text.integer("sliding_window", high=MOST_POSITIONS)
    heads, shapes = text.integer("num_attention_heads"), []
    for index, (size, kv_heads) in enumerate(head_sizes(text, kinds)):
        if heads % kv_heads:
            raise ForerunError(
                f"{text.name('num_key_value_heads')}: the {heads} heads of layer {index} cannot share {kv_heads} "
                "key/value heads"
            )
        kind = kinds[index]
        layout = HeadLayout(heads, kv_heads, size)
        shapes.append(LayerShape(kind, layout, window if kind == SLIDING else 0, layer_rope(text, kind, size)))
    return shapes


def head_sizes(text: ConfigReader, kinds: Sequence[str]) -> list[tuple[int, int]]:
    """Head size and key/value heads of each layer, from either way in which configs say what differs."""
    size = text.integer("head_dim", high=LARGEST_HEAD)
    kv_heads = text.integer("num_key_value_heads")
    if "per_layer_config" in text:
        changes = text.part("per_layer_config")
        # transformers gives all numbers of layers as many digits as the last one has: "05".
        own = {name.lstrip("0") or "0": changes.part(name) for name in changes.values}
        known = [str(index) for index in range(len(kinds))]
        if lost := sorted(own.keys() - known):
            raise ForerunError(f"{text.name('per_layer_config')} names layer {lost[0][:40]!r}, which is none")
        if strange := sorted({name for each in own.values() for name in each.values if name not in CHANGEABLE}):
            raise ForerunError(f"{text.name('per_layer_config')} changes {strange[0][:40]!r}, which is not supported")
        layers = [own.get(name, changes.part(name)) for name in known]
        return [
            (each.integer("head_dim", size, high=LARGEST_HEAD), each.integer("num_key_value_heads", kv_heads))
            for each in layers
        ]
    wide = text.integer("global_head_dim", 512, high=LARGEST_HEAD)
    few = text.integer("num_global_key_value_heads", kv_heads) if text.flag("attention_k_eq_v", False) else kv_heads
    return [(wide, few) if kind == FULL else (size, kv_heads) for kind in kinds]


def layer_rope(text: ConfigReader, kind: str, size: int) -> RopeConfig:
    """How layers of a kind turn their heads; without settings as the family usually does."""
    if (settings := rope_part(text)).values:
        if kind not in settings:
            raise text.wrong("rope_parameters", f"settings of {SLIDING} and of {FULL}")
        return read_rope_settings(text, settings.part(kind), size, 1e4 if kind == SLIDING else 1e6)
    if kind == SLIDING:
        return RopeConfig(size, 1e4)
    return RopeConfig(size, 1e6, "proportional", partial_rotary_factor=0.25)


def last_of_kind(shapes: Sequence[LayerShape], kind: str, text: ConfigReader) -> int:
    """The last layer of a kind among those with keys and values of their own."""
    found = [index for index, shape in enumerate(shapes) if shape.kind == kind]
    if not found:
        raise ForerunError(
            f"{text.name('num_kv_shared_layers')}: no {kind} layer is left that has keys and values of its own"
        )
    return found[-1]


def attention(shape: LayerShape, source: int | None, text: ConfigReader) -> AttentionConfig:
    """Scores are not scaled: the norms of queries and keys are trained so."""
    layout = shape.heads
    if source is not None:
        layout = HeadLayout(layout.heads, 0, layout.size)
    return AttentionConfig(
        AttentionSpec(layout, shape.window, scale=1.0),
        shape.rope,
        source,
        head_norms=True,
        value_norms=True,
        values_are_keys=source is None and shape.kind == FULL and text.flag("attention_k_eq_v", False),
    )


def network(text: ConfigReader, shares: bool) -> DenseConfig:
    """The dense network; `shares`: of a layer that reads the keys and values of another."""
    wide = 2 if shares and text.flag("use_double_wide_mlp", False) else 1
    return DenseConfig(wide * text.integer("intermediate_size"), activation="gelu_tanh")


def experts(text: ConfigReader) -> BesideConfig | None:
    """Experts beside it, where there are any."""
    if not text.flag("enable_moe_block", False):
        return None
    found = BesideConfig(
        text.integer("num_experts"), text.integer("top_k_experts"), text.integer("moe_intermediate_size")
    )
    if found.top > found.count:
        raise ForerunError(f"{text.name('top_k_experts')} is {found.top}, but there are {found.count} experts")
    return found


def media_tokens(config: ConfigReader) -> tuple[int, ...]:
    """Tokens that stand for media in prompts."""
    return tuple(config.integer(name, usual, low=0) for name, usual in MEDIA.items())


def ignored(sharing: Sequence[int]) -> tuple[str, ...]:
    """Beginnings of tensors that nobody reads: what files may hold of layers that share."""
    unread = [f"layers.{index}.self_attn.{part}." for index in sharing for part in ("k_proj", "v_proj", "k_norm")]
    return tuple(prefix + name for prefix in PREFIXES for name in unread)
