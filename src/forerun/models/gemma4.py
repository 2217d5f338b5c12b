"""`gemma4` and `gemma4_unified`, alone or beside their towers: windows in most layers, and four variants of a layer.

E2B and E4B have per-layer embeddings and let their upper layers read the keys and values of lower ones; 26B-A4B has
experts beside every dense network; where `attention_k_eq_v` is set, layers without a window take values from the
projection of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.errors import ForerunError
from forerun.kernels.interface import AttentionSpec, DeltaLayout, HeadLayout
from forerun.models.layers.config import (
    FULL,
    LARGEST_HEAD,
    MOST_POSITIONS,
    SLIDING,
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    LayerConfig,
    PerLayerConfig,
    decoder_config,
    kinds_in_turn,
    read_experts,
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


def read_config(config: ConfigReader) -> DecoderConfig:
    """Nested beside the settings of towers, or flat."""
    unified, text = is_unified(config), text_model(config)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("attention_bias", False)
    text.only("use_bidirectional_attention", None, "vision")
    own = own_mixers(text)
    first = max(0, len(own) - text.integer("num_kv_shared_layers", 0, low=0))  # that reads the keys of another
    mixers = own[:first] + [sharing(text, own[:first], index, own[index]) for index in range(first, len(own))]
    usual = 256 if "hidden_size_per_layer_input" not in text.values else 0  # null means none, absence does not
    size = 0 if unified else text.integer("hidden_size_per_layer_input", usual, low=0)
    vocab, experts = text.integer("vocab_size"), None
    if not unified and text.flag("enable_moe_block", False):
        experts = read_experts(text, "top_k_experts", activation="gelu_tanh")
    return decoder_config(
        config,
        text,
        [LayerConfig(mixer, network(text, index >= first > 0), experts) for index, mixer in enumerate(mixers)],
        tied=True,
        sandwich_norms=True,
        embedding_scale=text.integer("hidden_size") ** 0.5,
        softcap=text.number("final_logit_softcapping") if "final_logit_softcapping" in text else 0.0,
        layer_scalars=True,
        per_layer=PerLayerConfig(size, text.integer("vocab_size_per_layer_input", low=vocab)) if size else None,
        never=tuple(media_tokens(config).values()) if "text_config" in config else (),
        prefixes=PREFIXES,
        towers=tuple(f"model.{tower}" for tower in TOWERS),
        ignored=ignored(range(first, len(own))),
    )


def is_unified(config: ConfigReader) -> bool:
    """A model without towers, or its assistant: what the language model says of itself has the first word."""
    return config.text_model().text("model_type", config.text("model_type")).startswith("gemma4_unified")


def text_model(config: ConfigReader) -> ConfigReader:
    """The settings of the language model, absent ones filled in."""
    return config.text_model(UNIFIED_USUAL if is_unified(config) else USUAL)


def own_mixers(text: ConfigReader) -> list[AttentionConfig]:
    """Every layer as if it had keys and values of its own. Scores are not scaled: the norms are trained so."""
    kinds = [*kinds_in_turn(text, PATTERN)[:-1], FULL]  # whatever is listed
    window = text.integer("sliding_window", high=MOST_POSITIONS)
    keys_as_values = text.flag("attention_k_eq_v", False)
    heads, mixers = text.integer("num_attention_heads"), []
    for index, (kind, (size, kv_heads)) in enumerate(zip(kinds, head_sizes(text, kinds), strict=True)):
        if heads % kv_heads:
            raise ForerunError(
                f"{text.name('num_key_value_heads')}: the {heads} heads of layer {index} cannot share {kv_heads} "
                "key/value heads"
            )
        spec = AttentionSpec(HeadLayout(heads, kv_heads, size), window if kind == SLIDING else 0, scale=1.0)
        mixers.append(
            AttentionConfig(
                spec,
                layer_rope(text, kind, size),
                head_norms=True,
                value_norms=True,
                values_are_keys=keys_as_values and kind == FULL,
            )
        )
    return mixers


def kind_of(mixer: AttentionConfig) -> str:
    """Its name in `layer_types`."""
    return SLIDING if mixer.spec.window else FULL


def last_of_kind(mixers: Sequence[AttentionConfig | DeltaLayout], kind: str) -> int | None:
    """The last layer of a kind that has keys and values of its own."""
    found = [
        index
        for index, mixer in enumerate(mixers)
        if isinstance(mixer, AttentionConfig) and mixer.source is None and kind_of(mixer) == kind
    ]
    return found[-1] if found else None


def sharing(text: ConfigReader, before: Sequence[AttentionConfig], index: int, own: AttentionConfig) -> AttentionConfig:
    """Layer `index` as a reader of the keys and values of the last of its kind `before`."""
    source, layout, name = last_of_kind(before, kind_of(own)), own.spec.layout, text.name("num_kv_shared_layers")
    if source is None:
        raise ForerunError(f"{name}: no {kind_of(own)} layer is left that has keys and values of its own")
    theirs = before[source].spec.layout
    if theirs.size != layout.size or layout.heads % theirs.kv_heads:
        raise ForerunError(f"{name}: layer {index} cannot read the keys of its kind")
    return reader_of(source, own)


def reader_of(source: int, own: AttentionConfig) -> AttentionConfig:
    """The same layer without keys and values of its own: it reads those of layer `source`."""
    spec = replace(own.spec, layout=replace(own.spec.layout, kv_heads=0))
    return replace(own, spec=spec, source=source, values_are_keys=False)


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


def network(text: ConfigReader, shares: bool) -> DenseConfig:
    """The dense network; `shares`: of a layer that reads the keys and values of another."""
    wide = 2 if shares and text.flag("use_double_wide_mlp", False) else 1
    return DenseConfig(wide * text.integer("intermediate_size"), activation="gelu_tanh")


def media_tokens(config: ConfigReader) -> dict[str, int]:
    """Tokens that stand for media in prompts, by the names of `MEDIA`."""
    tokens = {name: config.integer(name, usual, low=0) for name, usual in MEDIA.items()}
    if "eoa_token_id" in config:  # the other name of the same
        tokens["eoa_token_index"] = config.integer("eoa_token_id", low=0)
    return tokens


def ignored(sharing: Sequence[int]) -> tuple[str, ...]:
    """Beginnings of tensors that nobody reads: what files may hold of layers that share."""
    unread = [f"layers.{index}.self_attn.{part}." for index in sharing for part in ("k_proj", "v_proj", "k_norm")]
    return tuple(prefix + name for prefix in PREFIXES for name in unread)
