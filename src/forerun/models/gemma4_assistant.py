"""`gemma4_assistant` and `gemma4_unified_assistant`: assistants of Gemma 4 models, and whether one fits a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.errors import ForerunError
from forerun.kernels.interface import AttentionSpec
from forerun.models import gemma4
from forerun.models.gemma4 import LayerShape, layer_shapes
from forerun.models.layers.assistant import Assistant, CentroidHead, DenseHead
from forerun.models.layers.config import FULL, SLIDING, AttentionConfig, DecoderConfig, LayerConfig, read_eps
from forerun.models.layers.decoder import Decoder, embedding_table
from forerun.models.layers.loader import Loader
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader

POSITIONS = ("n-1", "n")  # where queries may stand: at the last committed token, or at the pending one
ORDERING = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """What an assistant's config.json says."""

    path: str
    hidden: int  # of its target
    shapes: tuple[LayerShape, ...]
    text: ConfigReader
    clusters: int  # of the vocabulary; 0: one dense output matrix
    top: int  # clusters that are looked at

    @property
    def vocab(self) -> int:
        return self.text.integer("vocab_size")


def read_assistant(config: ConfigReader) -> AssistantConfig:
    """The description alone, checked for itself."""
    text = gemma4.text_model(config)
    text.only("hidden_activation", "gelu_pytorch_tanh")
    text.only("attention_bias", False)
    text.only("enable_moe_block", False)
    text.only("use_double_wide_mlp", False)
    text.only("hidden_size_per_layer_input", 0)
    found = AssistantConfig(
        path=config.where.removesuffix("/config.json"),
        hidden=config.integer("backbone_hidden_size"),
        shapes=tuple(layer_shapes(text)),
        text=text,
        clusters=config.integer("num_centroids", 2048) if config.flag("use_ordered_embeddings", False) else 0,
        top=config.integer("centroid_intermediate_top_k", 32),
    )
    if found.clusters and (found.vocab % found.clusters or found.top > found.clusters):
        raise ForerunError(
            f"{config.name('num_centroids')}: {found.vocab} tokens cannot be split into {found.clusters} clusters of "
            f"which {found.top} are looked at"
        )
    return found


def fitting_layers(config: AssistantConfig, target: DecoderConfig) -> tuple[LayerConfig, ...]:
    """Its layers as readers of the target's pages; an error that names everything that differs."""
    wrong = []
    if config.hidden != target.hidden:
        wrong.append(f"it is for a hidden size of {config.hidden}, not {target.hidden}")
    if config.vocab != target.vocab:
        wrong.append(f"it has {config.vocab} tokens, not {target.vocab}")
    sources = {kind: source_layer(target, kind) for kind in (SLIDING, FULL)}
    layers, seen = [], set()
    for shape in config.shapes:
        source = sources[shape.kind]
        if shape.kind not in seen:
            wrong += differences(shape, None if source is None else target.layers[source].mixer)
            seen.add(shape.kind)
        mixer = gemma4.attention(shape, source or 0, config.text)
        layers.append(LayerConfig(mixer, gemma4.network(config.text, shares=False)))
    if wrong:
        raise ForerunError(f"the assistant {config.path} does not fit the model: {'; '.join(wrong)}")
    return tuple(layers)


def source_layer(target: DecoderConfig, kind: str) -> int | None:
    """The target's layer whose keys and values are read: the last of its kind that has its own."""
    found = [
        index
        for index, layer in enumerate(target.layers)
        if isinstance(layer.mixer, AttentionConfig)
        and layer.mixer.source is None
        and (layer.mixer.spec.window > 0) == (kind == SLIDING)
    ]
    return found[-1] if found else None


def differences(shape: LayerShape, source: object) -> list[str]:
    """What keeps a layer from reading the keys and values of another, in words."""
    if not isinstance(source, AttentionConfig):
        return [f"the model has no {shape.kind} layer"]
    spec: AttentionSpec = source.spec
    pairs = {
        "key/value heads": (shape.heads.kv_heads, spec.layout.kv_heads),
        "columns of a head": (shape.heads.size, spec.layout.size),
        "window": (shape.window, spec.window),
        "rotary settings": (shape.rope.parameters(), source.rope.parameters()),
    }
    return [f"{name} of its {shape.kind} layers: {own}, not {its}" for name, (own, its) in pairs.items() if own != its]


def build_assistant(config: AssistantConfig, checkpoint: Checkpoint, target: Decoder, position: str) -> Assistant:
    """Read the weights of an assistant for `target`, which is checked first."""
    assert position in POSITIONS
    layers, text, kernels = fitting_layers(config, target.config), config.text, target.kernels
    size, vocab = text.integer("hidden_size"), config.vocab
    own = replace(
        target.config, hidden=size, eps=read_eps(text), layers=layers, per_layer=None, layer_scalars=True, never=()
    )
    loader = Loader(own, kernels, checkpoint, target.device, target.dtype, target.rope)
    assistant = Assistant(
        kernels=kernels,
        embed=target.embed,
        rope=target.rope,
        layers=[
            loader.layer(f"model.layers.{index}.", layer, target.config.state_index(layer.mixer.source))
            for index, layer in enumerate(layers)
            if isinstance(layer.mixer, AttentionConfig) and layer.mixer.source is not None
        ],
        pre=loader.exact("pre_projection.weight", size, 2 * config.hidden),
        post=loader.exact("post_projection.weight", config.hidden, size),
        norm=loader.norm("model.norm.weight", size),
        eps=own.eps,
        head=read_head(config, loader, size, vocab),
        ahead=POSITIONS.index(position),
    )
    checkpoint.finish(lambda name: name == "lm_head.weight" or ".self_attn.k_" in name or ".self_attn.v_" in name)
    return assistant


def read_head(config: AssistantConfig, loader: Loader, size: int, vocab: int) -> DenseHead | CentroidHead:
    """The output matrix, whole or in clusters."""
    checkpoint, kernels = loader.checkpoint, loader.kernels
    name = "lm_head.weight" if checkpoint.has("lm_head.weight") else "model.embed_tokens.weight"
    table = embedding_table(checkpoint.take(name, (vocab, size)), loader.device, loader.dtype)
    if name == "lm_head.weight" and checkpoint.has("model.embed_tokens.weight"):
        checkpoint.take("model.embed_tokens.weight", (vocab, size))  # an input that nobody uses
    if not config.clusters:
        return DenseHead(kernels.matrix(table.to(loader.dtype), None))
    tokens = checkpoint.integers(ORDERING).to(loader.device, torch.int64)
    if tokens.shape != (vocab,) or not torch.equal(tokens.sort().values, torch.arange(vocab, device=tokens.device)):
        raise ForerunError(f"{checkpoint.path}: {ORDERING} must hold every token once")
    return CentroidHead(
        centroids=loader.exact("masked_embedding.centroids.weight", config.clusters, size),
        tokens=tokens.view(config.clusters, -1),
        table=table[tokens].view(config.clusters, -1, size).contiguous(),
        top=config.top,
    )
