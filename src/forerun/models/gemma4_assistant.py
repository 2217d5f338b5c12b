"""`gemma4_assistant` and `gemma4_unified_assistant`: assistants of Gemma 4 models, and whether one fits a target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from forerun.errors import ForerunError
from forerun.kernels.matrix import as_tensor
from forerun.models import gemma4
from forerun.models.layers.assistant import Assistant, CentroidHead, DenseHead
from forerun.models.layers.config import FULL, SLIDING, AttentionConfig, DecoderConfig, LayerConfig, read_eps
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.loader import Loader, embedding_table
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader

POSITIONS = ("n-1", "n")  # where queries may stand: at the last committed token, or at the pending one
ORDERING = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """What an assistant's config.json says."""

    path: str
    hidden: int  # of its target
    mixers: list[AttentionConfig]  # as if they had keys and values of their own
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
        mixers=gemma4.own_mixers(text),
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
    theirs = [layer.mixer for layer in target.layers]
    sources = {kind: gemma4.last_of_kind(theirs, kind) for kind in (SLIDING, FULL)}
    for own in config.mixers:
        source = sources[kind := gemma4.kind_of(own)]
        found = differences(kind, own, None if source is None else theirs[source])
        wrong += [each for each in found if each not in wrong]
    if wrong:
        raise ForerunError(f"the assistant {config.path} does not fit the model: {'; '.join(wrong)}")
    mixers = [gemma4.reader_of(sources[gemma4.kind_of(own)] or 0, own) for own in config.mixers]
    return tuple(LayerConfig(mixer, gemma4.network(config.text, shares=False)) for mixer in mixers)


def differences(kind: str, own: AttentionConfig, source: object) -> list[str]:
    """What keeps layers of a kind from reading the keys and values of another, in words."""
    if not isinstance(source, AttentionConfig):
        return [f"the model has no {kind} layer"]
    mine, its = own.spec, source.spec
    pairs = {
        "key/value heads": (mine.layout.kv_heads, its.layout.kv_heads),
        "columns of a head": (mine.layout.size, its.layout.size),
        "window": (mine.window, its.window),
        "rotary settings": (own.rope.parameters(), source.rope.parameters()),
    }
    return [f"{name} of its {kind} layers: {one}, not {other}" for name, (one, other) in pairs.items() if one != other]


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
    table = embedding_table(checkpoint.table(name, (vocab, size)), loader.device, loader.dtype)
    if name == "lm_head.weight" and checkpoint.has("model.embed_tokens.weight"):
        checkpoint.table("model.embed_tokens.weight", (vocab, size))  # an input that nothing uses
    if not config.clusters:
        return DenseHead(kernels.matrix(table.to(loader.device, loader.dtype), None))
    tokens = checkpoint.integers(ORDERING).to(loader.device, torch.int64)
    if tokens.shape != (vocab,) or not torch.equal(tokens.sort().values, torch.arange(vocab, device=tokens.device)):
        raise ForerunError(f"{checkpoint.path}: {ORDERING} must hold every token once")
    return CentroidHead(
        centroids=loader.exact("masked_embedding.centroids.weight", config.clusters, size),
        tokens=tokens.view(config.clusters, -1),
        table=as_tensor(table[tokens.flatten()]).view(config.clusters, -1, size).contiguous(),
        top=config.top,
    )
