"""From a folder with a trained head to a head that runs beside its target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.families import TRAINABLE, read_config
from forerun.models.layers.config import AttentionConfig, DecoderConfig
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.loader import Loader
from forerun.models.layers.mtp import MtpHead, read_head
from forerun.models.layers.rope import RopeTables
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.heads import HeadFolder

DRAFT_VOCABULARY = "mtp.draft_vocab"


def build_head(folder: HeadFolder, decoder: Decoder, vocab: int) -> MtpHead:
    """Read a head's tensors and pack them the way the target's are; ids from `vocab` on are never drafted."""
    config, checkpoint = block_config(folder), folder.open()
    kernels, device, dtype, hidden = decoder.kernels, decoder.device, decoder.dtype, config.hidden
    loader = Loader(config, kernels, checkpoint, device, dtype, RopeTables(config.ropes, device))
    vocabulary = draft_vocabulary(checkpoint, folder.target.vocab_size, vocab)
    output = decoder.head
    if vocabulary is not None:
        vocabulary = vocabulary.to(device)
        output = kernels.draft_matrix(decoder.output_rows(vocabulary).to(dtype))
    head = read_head(loader, config.layers[0], decoder.embedding, output)
    head.vocabulary, head.taps = vocabulary, folder.taps
    if folder.taps:
        inputs = len(folder.taps) + 1
        head.tap_norms = tuple(loader.norm(f"mtp.tap_norms.{n}.weight", hidden) for n in range(inputs))
        head.fuse_matrix = loader.exact("mtp.fuse.weight", hidden, inputs * hidden)
    checkpoint.finish(lambda name: name == DRAFT_VOCABULARY)
    return head


def block_config(folder: HeadFolder) -> DecoderConfig:
    """The shape of the head's block, read as its target's family reads a config.json of one layer."""
    target, where = folder.target, f"the MTP head {folder.path}"
    if target.model_type not in TRAINABLE:
        raise ForerunError(f"{where} has a block of {target.model_type!r}, which trained heads lack")
    settings = {
        **folder.layer,
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 1,
        "layer_types": None,
    }
    config = read_config(ConfigReader(settings, where, "layer."))
    layer = config.layers[0]
    assert isinstance(layer.mixer, AttentionConfig)
    spec = replace(layer.mixer.spec, window=0)
    return replace(config, layers=(replace(layer, mixer=replace(layer.mixer, spec=spec)),))


def draft_vocabulary(checkpoint: Checkpoint, size: int, vocab: int) -> Tensor | None:
    """Target ids that the head drafts, ascending; ids beyond the tokenizer's are left out."""
    if not checkpoint.has(DRAFT_VOCABULARY):
        return None
    ids = checkpoint.integers(DRAFT_VOCABULARY)
    good = (
        ids.ndim == 1 and len(ids) > 0 and bool((ids[1:] > ids[:-1]).all()) and 0 <= int(ids[0]) <= int(ids[-1]) < size
    )
    if not good:
        raise ForerunError(f"{checkpoint.path}: {DRAFT_VOCABULARY} must be ascending token ids below {size}")
    ids = ids[ids < vocab]
    if not len(ids):
        raise ForerunError(f"{checkpoint.path}: {DRAFT_VOCABULARY} names no token that the tokenizer has")
    return ids.to(torch.int64)
