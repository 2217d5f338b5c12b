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
        seen, scale = kernels.linear(x, self.project, prefill), x.shape[1] ** -0.5
        own = kernels.layer_inputs(seen, scale, self.norm, self.eps, tokens, self.table, self.table_scale)
        return own.view(len(tokens), -1, len(self.norm))
