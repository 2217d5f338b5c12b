"""A multi-token-prediction head: from the target's hidden states and the next token to a draft of the one after.

Entry t of a head is made from the target's features of position t − 1 and the token at t; its output predicts the token
at t + 1. Drafting further, a head takes its own last output in place of features. Native heads and trained ones differ
in the description of their block, in what they are fed (the last hidden state, or several depths fused) and in how
norms are stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.interface import HeadLayout, Kernels
from forerun.kernels.matrix import Matrix, Table
from forerun.models.layers.config import AttentionConfig, LayerConfig
from forerun.models.layers.layer import Layer
from forerun.models.layers.loader import Loader
from forerun.models.layers.mixers import AllAngles, AttentionMixer
from forerun.models.layers.rope import RopeTables
from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class MtpHead:
    """Everything around the block. Norms hold the factor that is multiplied with, however a file stores it."""

    kernels: Kernels
    block: Layer  # its keys and values are the only ones in the head's pages
    rope: RopeTables
    embedding: Table  # [vocabulary, hidden], the target's
    embedding_norm: Tensor  # [hidden]
    hidden_norm: Tensor
    final_norm: Tensor
    fc: Matrix  # [hidden, 2 · hidden], never quantised: it joins inputs of very different size
    eps: float
    output: Matrix  # [draft vocabulary, hidden]
    taps: tuple[int, ...] = ()  # layers of the target whose inputs are features, beside its last hidden state
    tap_norms: tuple[Tensor, ...] = ()  # one per tap and one for the last hidden state
    fuse_matrix: Matrix | None = None  # [hidden, (taps + 1) · hidden], never quantised
    vocabulary: Tensor | None = None  # target ids of the rows of `output`, ascending [draft vocabulary]; None: all

    @property
    def layout(self) -> HeadLayout:
        """The shape of its keys and values."""
        assert isinstance(self.block.mixer, AttentionMixer)
        return self.block.mixer.spec.layout

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own matrices; the embedding is the target's, and so is an output matrix without a vocabulary."""
        own = [*self.block.matrices(), self.fc]
        own += [] if self.fuse_matrix is None else [self.fuse_matrix]
        own += [] if self.vocabulary is None else [self.output]
        return sum(matrix.bytes for matrix in own)

    def fuse(self, features: Tensor) -> Tensor:
        """Features of the target [rows, (taps + 1) · hidden] → [rows, hidden]."""
        return features if self.fuse_matrix is None else self.fuse_with(self.kernels, features)

    def fuse_with(self, kernels: Kernels, features: Tensor) -> Tensor:
        """As `fuse`, by kernels that may also write down what they would do."""
        assert self.fuse_matrix is not None
        size = features.shape[1] // len(self.tap_norms)
        normed = [
            kernels.rms_norm(kernels.columns(features, index * size, (index + 1) * size), gain, self.eps)
            for index, gain in enumerate(self.tap_norms)
        ]
        return kernels.linear(kernels.beside(normed), self.fuse_matrix)

    def forward(self, hidden: Tensor, batch: Pass) -> Tensor:
        """Outputs of the wanted rows. `hidden` [rows, hidden]: fused features of the position before each row, or the
        head's own outputs.
        """
        return self.run(self.kernels, batch, self.rope.angles(batch), self.embed(batch, hidden.dtype), hidden)

    def run(self, kernels: Kernels, batch: Pass, angles: AllAngles, embedded: Tensor, hidden: Tensor) -> Tensor:
        """As `forward`, with the embeddings of the tokens."""
        x = self._join(kernels, embedded, hidden)
        normed = kernels.rms_norm(x, self.block.input_norm, self.eps)
        _, out = self.block.forward(kernels, x, normed, self.final_norm, batch, angles)
        return kernels.pick(out, batch.wanted)

    def draft(self, hidden: Tensor, batch: Pass) -> tuple[Tensor, Tensor]:
        """As `forward`, and the logits of the wanted rows."""
        found = self.forward(hidden, batch)
        return found, self.logits(found)

    def fill(self, hidden: Tensor, batch: Pass) -> None:
        """As `forward` for rows whose outputs are not wanted."""
        self.fill_with(self.kernels, batch, self.rope.angles(batch), self.embed(batch, hidden.dtype), hidden)

    def fill_with(self, kernels: Kernels, batch: Pass, angles: AllAngles, embedded: Tensor, hidden: Tensor) -> None:
        """As `fill`, with the embeddings of the tokens."""
        self.block.fill(kernels, self._join(kernels, embedded, hidden), batch, angles)

    def embed(self, batch: Pass, dtype: torch.dtype) -> Tensor:
        """Embeddings of the rows' tokens, in the precision of activations."""
        embedded = self.kernels.embed(batch.tokens, self.embedding).to(dtype)
        return embedded if batch.media is None else batch.media.merge(embedded)

    def _join(self, kernels: Kernels, embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = [
            kernels.rms_norm(embedded, self.embedding_norm, self.eps),
            kernels.rms_norm(hidden, self.hidden_norm, self.eps),
        ]
        return kernels.linear(kernels.beside(pair), self.fc)

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [rows, hidden] → float32 logits [rows, draft vocabulary]."""
        return self.kernels.logits(hidden, self.output)


def read_head(loader: Loader, block: LayerConfig, embedding: Table, output: Matrix) -> MtpHead:
    """What native heads and trained ones have in common, under the same names."""
    hidden = loader.config.hidden
    return MtpHead(
        kernels=loader.kernels,
        block=loader.layer("mtp.layers.0.", block, 0),
        rope=loader.rope,
        embedding=embedding,
        embedding_norm=loader.norm("mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=loader.norm("mtp.pre_fc_norm_hidden.weight", hidden),
        final_norm=loader.norm("mtp.norm.weight", hidden),
        fc=loader.exact("mtp.fc.weight", hidden, 2 * hidden),
        eps=loader.config.eps,
        output=output,
    )


def native_head(loader: Loader, embedding: Table, output: Matrix) -> MtpHead | None:
    """The head that Qwen3.5 checkpoints ship, one gated attention block; None when there neither is nor should be one.

    Files in Hugging Face layout store every norm of it zero-centred (the factor is 1 + w), whatever the values look
    like: two of the seven have true factors that a guess from their size would get wrong.
    """
    config, checkpoint = loader.config, loader.checkpoint
    present = any(name.startswith("mtp.") for name in checkpoint.names())
    if not present and not config.mtp_layers:
        return None
    if not present:
        raise ForerunError(
            f"{checkpoint.path}: config.json declares an MTP head (mtp_num_hidden_layers = {config.mtp_layers}) but "
            "the weights hold no mtp.* tensors: they were stripped; use the original checkpoint or train a head"
        )
    if config.mtp_layers > 1 or any(name.startswith("mtp.layers.1.") for name in checkpoint.names()):
        raise ForerunError(f"{checkpoint.path}: an MTP head of more than one block is not supported")
    if config.mtp_own_embedding:
        raise ForerunError(f"{checkpoint.path}: an MTP head with an embedding of its own is not supported")
    kind = next(layer for layer in config.layers if isinstance(layer.mixer, AttentionConfig))
    head = read_head(loader, kind, embedding, output)
    checkpoint.finish(lambda name: not name.startswith("mtp."))
    return head
