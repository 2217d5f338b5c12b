"""Per-layer embeddings: every layer gets a small input of its own, from the token and from its embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix


@dataclass(slots=True)
class PerLayerInputs:
    """Weights of all layers' inputs together."""

    table: Tensor  # [vocabulary, layers · size], by token
    table_scale: float
    project: Matrix  # [layers · size, hidden], from the embedding
    norm: Tensor  # [size]
    eps: float

    def forward(self, kernels: Kernels, tokens: Tensor, x: Tensor, prefill: bool) -> Tensor:
        """[rows, layers, size] for tokens [rows] with embeddings x [rows, hidden]."""
        rows, size = len(tokens), len(self.norm)
        known = kernels.embed(tokens, self.table).to(x.dtype) * self.table_scale
        seen = kernels.linear(x, self.project, prefill) * x.shape[1] ** -0.5
        seen = kernels.rms_norm(seen.view(-1, size), self.norm, self.eps)
        own: Tensor = ((seen.view(rows, -1) + known) * 2.0**-0.5).view(rows, -1, size)
        return own
