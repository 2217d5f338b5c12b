"""The two mixers of a hybrid decoder: the gated delta rule, and attention whose output is gated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import (
    Angles,
    AttentionSpec,
    Decay,
    DeltaLayout,
    HeadLayout,
    HeadNorms,
    Kernels,
    LayerPages,
)
from forerun.kernels.matrix import Matrix
from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class DeltaMixer:
    """Weights of a gated delta rule layer. What decides the state's fate is kept in float32 and never quantised."""

    layout: DeltaLayout
    project: Matrix  # [layout.width + layout.values, hidden]: convolved columns, then the output's gate
    gates: Matrix | None  # [2 · value heads, hidden]: strength, then decay; None where `project` ends with them
    convolution: Tensor  # [window, layout.width] float32
    decay: Decay
    norm: Tensor  # [value size] float32
    output: Matrix  # [hidden, layout.values]
    index: int  # among the recurrent layers

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor, batch: Pass, eps: float) -> Tensor:
        """[rows, hidden] → `before` and what it adds; takes part in the state of each sequence."""
        layout, rows = self.layout, batch.rows
        projected = kernels.linear(x, self.project, batch.prefill)
        gates = projected[:, layout.width + layout.values :]
        if self.gates is not None:
            gates = kernels.linear(x, self.gates, batch.prefill)
        out = kernels.recurrence(
            projected, gates, layout, rows, self.index, self.convolution, self.decay, batch.prefill
        )
        out = kernels.gated_norm(out, projected, layout.width, self.norm, eps)
        return kernels.add_linear(out, self.output, before, batch.prefill)

    def matrices(self) -> list[Matrix]:
        """All weights."""
        return [self.project, *([] if self.gates is None else [self.gates]), self.output]


@dataclass(slots=True)
class AttentionMixer:
    """Weights of an attention layer with norms on heads and a gate on its output."""

    layout: HeadLayout
    project: Matrix  # [layout.width + layout.key_column, hidden]: queries, keys, values, gates
    head_norms: HeadNorms
    output: Matrix  # [hidden, layout.key_column]

    def forward(
        self, kernels: Kernels, x: Tensor, before: Tensor, batch: Pass, pages: LayerPages, angles: Angles
    ) -> Tensor:
        """[rows, hidden] → `before` and what it adds; every row's keys and values go to its sequence's pages."""
        layout = self.layout
        projected = self.write_keys(kernels, x, batch, pages, angles)
        out = kernels.attention(projected, AttentionSpec(layout), batch.rows, pages, batch.prefill)
        out = kernels.sigmoid_gate(out, projected, layout.width)
        return kernels.add_linear(out, self.output, before, batch.prefill)

    def write_keys(self, kernels: Kernels, x: Tensor, batch: Pass, pages: LayerPages, angles: Angles) -> Tensor:
        """Queries, keys, values and gates [rows, …]; keys and values are in their pages."""
        projected = kernels.linear(x, self.project, batch.prefill)
        kernels.place(projected, self.layout, batch.rows, pages, angles, self.head_norms)
        return projected

    def matrices(self) -> list[Matrix]:
        """All weights."""
        return [self.project, self.output]
