"""An assistant: a small decoder without keys and values of its own, which reads those of its target.

It predicts the token after the pending one from two things: the embedding of that token and the target's hidden state
at the last committed position. For the token after, its own output, projected back, stands for the hidden state.
Position and visible keys stay the same all along: those of the last committed position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import Angles, Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.layer import Layer, norms_after
from forerun.models.layers.mixers import AllAngles
from forerun.models.layers.rope import RopeTables
from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class DenseHead:
    """Logits of all tokens."""

    matrix: Matrix  # [vocabulary, size]

    def logits(self, kernels: Kernels, x: Tensor) -> Tensor:
        """[rows, size] → float32 [rows, vocabulary]."""
        return kernels.logits(x, self.matrix)


@dataclass(slots=True)
class CentroidHead:
    """Logits of the tokens in the clusters whose centroids fit best; all others are ruled out."""

    centroids: Matrix  # [clusters, size], never quantised
    tokens: Tensor  # [clusters, tokens of each] int64: their ids
    table: Tensor  # [clusters, tokens of each, size]: their rows of the output matrix
    top: int

    def logits(self, kernels: Kernels, x: Tensor) -> Tensor:
        """[rows, size] → float32 [rows, vocabulary]."""
        best = kernels.logits(x, self.centroids).topk(self.top, dim=1).indices  # [rows, top]
        known = kernels.cluster_logits(x, self.table, best)
        everything = known.new_full((len(x), self.tokens.numel()), float("-inf"))
        return everything.scatter_(1, self.tokens[best].flatten(1), known)


@dataclass(slots=True)
class Assistant:
    """Weights of an assistant, and what it shares with its target."""

    kernels: Kernels
    embed: Callable[[Tensor], Tensor]  # the target's embeddings, as its first layer reads them
    rope: RopeTables  # the target's
    layers: list[Layer]
    pre: Matrix  # [size, 2 · hidden of the target], never quantised: it joins inputs of very different size
    post: Matrix  # [hidden of the target, size], never quantised
    norm: Tensor  # [size]
    eps: float
    head: DenseHead | CentroidHead
    ahead: int = 0  # positions that queries are turned beyond the last committed one

    @property
    def hidden(self) -> int:
        """Columns of the target's hidden states."""
        return self.post.shape[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own matrices; embeddings are the target's."""
        own = [self.pre, self.post, *(matrix for layer in self.layers for matrix in layer.matrices())]
        if isinstance(self.head, DenseHead):
            return sum(matrix.bytes for matrix in [*own, self.head.matrix])
        return sum(matrix.bytes for matrix in [*own, self.head.centroids]) + self.head.table.nbytes

    @property
    def vocab(self) -> int:
        """Tokens that it gives logits for."""
        return self.head.matrix.shape[0] if isinstance(self.head, DenseHead) else self.head.tokens.numel()

    def forward(self, hidden: Tensor, batch: Pass) -> Tensor:
        """Outputs [rows, size] for `batch.tokens` after hidden states [rows, hidden]; nothing is written to pages."""
        kernels, angles = self.kernels, self._angles(batch)
        pair = torch.cat([self.embed(batch.tokens), hidden], dim=1)
        x = kernels.linear(pair, self.pre)
        normed = kernels.rms_norm(x, self.layers[0].input_norm, self.eps)
        for layer, norm in zip(self.layers, norms_after(self.layers, self.norm), strict=True):
            x, normed = layer.forward(kernels, x, normed, norm, batch, angles)
        return normed

    def _angles(self, batch: Pass) -> AllAngles:
        """Queries stand at the last committed position, which decides what they see, and may be turned further."""
        found = self.rope.angles(batch)
        if not self.ahead:
            return found
        return {rope: Angles(each.cos[self.ahead :], each.sin[self.ahead :]) for rope, each in found.items()}

    def logits(self, x: Tensor) -> Tensor:
        """Outputs [rows, size] → float32 logits [rows, vocabulary]."""
        return self.head.logits(self.kernels, x)

    def project(self, x: Tensor) -> Tensor:
        """Outputs [rows, size] → what stands for the target's hidden states [rows, hidden]."""
        return self.kernels.linear(x, self.post)
