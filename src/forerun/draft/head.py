"""From a folder with a trained head to a head that runs beside its target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.matrix import Matrix
from forerun.models.families import READERS
from forerun.models.layers.block import Loader
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead, PlainBlock
from forerun.models.layers.rope import Rope, frequencies
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.heads import HeadFolder

DRAFT_VOCABULARY = "mtp.draft_vocab"


def build_head(folder: HeadFolder, decoder: Decoder, vocab: int) -> MtpHead:
    """Read a head's tensors and pack them the way the target's are; ids from `vocab` on are never drafted."""
    config, checkpoint = block_config(folder), folder.open()
    kernels, device, dtype, hidden = decoder.kernels, decoder.device, decoder.dtype, config.hidden
    loader = Loader(config, kernels, checkpoint, device, dtype)

    def exact(name: str, width: int) -> Matrix:
        return kernels.float_matrix(checkpoint.take(name, (hidden, width)).to(device, dtype), None)

    inputs = len(folder.taps) + 1
    vocabulary = draft_vocabulary(checkpoint, folder.target.vocab_size, vocab)
    output = decoder.head
    if vocabulary is not None:
        vocabulary = vocabulary.to(device)
        output = kernels.matrix(decoder.output_rows(vocabulary).to(dtype), None)
    head = MtpHead(
        kernels=kernels,
        block=PlainBlock(
            kernels, config, loader.layer("mtp.layers.0.", 0), Rope(config.rope, config.layout.size, device)
        ),
        embedding=decoder.embedding,
        embedding_norm=loader.vector("mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=loader.vector("mtp.pre_fc_norm_hidden.weight", hidden),
        final_norm=loader.vector("mtp.norm.weight", hidden),
        fc=exact("mtp.fc.weight", 2 * hidden),
        eps=config.eps,
        output=output,
        taps=folder.taps,
        tap_norms=tuple(loader.vector(f"mtp.tap_norms.{n}.weight", hidden) for n in range(inputs))
        if folder.taps
        else (),
        fuse_matrix=exact("mtp.fuse.weight", inputs * hidden) if folder.taps else None,
        vocabulary=vocabulary,
    )
    checkpoint.finish(lambda name: name == DRAFT_VOCABULARY)
    return head


def block_config(folder: HeadFolder) -> DecoderConfig:
    """The shape of the head's block, read as its target's family reads a config.json of one layer."""
    target = folder.target
    reader = READERS.get(target.model_type)
    if reader is None:
        raise ForerunError(f"the MTP head {folder.path} has a block of {target.model_type!r}, which trained heads lack")
    settings = {
        **folder.layer,
        "model_type": target.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 1,
        "layer_types": None,
    }
    try:
        config = replace(reader(settings), windows=(0,))
        frequencies(config.rope, config.layout.size)
        return config
    except (TypeError, ValueError, KeyError, ForerunError) as error:
        raise ForerunError(f"the MTP head {folder.path}: its 'layer' is not usable ({error})") from error


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
