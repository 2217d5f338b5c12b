"""The two ways in which rows of a sequence see each other: attention, and the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Angles, AttentionSpec, Decay, DeltaLayout, HeadNorms, Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.feed_forward import added
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Pass

AllAngles = dict[Rope, Angles]  # of the rows of a pass, by table


@dataclass(slots=True)
class AttentionMixer:
    """Weights of an attention layer."""

    spec: AttentionSpec
    rope: Rope
    project: Matrix  # [layout.width, hidden]: queries, keys, values; with a gate [… + layout.key_column, hidden]
    gated: bool
    head_norms: HeadNorms | None
    output: Matrix  # [hidden, layout.key_column]
    index: int  # of its pages in `Pass.pages`

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor | None, batch: Pass, angles: AllAngles) -> Tensor:
        """[rows, hidden] → `before`, if any, and what it adds; keys and values of every row go to their pages."""
        projected = self.fill(kernels, x, batch, angles)
        out = kernels.attention(projected, self.spec, batch.rows, batch.pages[self.index])
        if self.gated:
            out = kernels.sigmoid_gate(out, projected, self.spec.layout.width)
        return added(kernels, out, self.output, before)

    def fill(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> Tensor:
        """The first part, up to keys and values in their pages: what `project` gives, queries ready."""
        projected = kernels.linear(x, self.project)
        pages = batch.pages[self.index]
        kernels.rotate_and_store(projected, self.spec.layout, batch.rows, pages, angles[self.rope], self.head_norms)
        return projected

    def matrices(self) -> list[Matrix]:
        """All weights."""
        return [self.project, self.output]


@dataclass(slots=True)
class DeltaMixer:
    """Weights of a gated delta rule layer. What decides the state's fate is kept in float32 and never quantised."""

    layout: DeltaLayout
    project: Matrix  # [layout.width + layout.values, hidden]: convolved columns, then the output's gate
    gates: Matrix | None  # [2 · value heads, hidden]: strength, then decay; None where `project` ends with them
    convolution: Tensor  # [window, layout.width] float32
    decay: Decay
    norm: Tensor  # [value size] float32
    eps: float
    output: Matrix  # [hidden, layout.values]
    index: int  # among the recurrent layers

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor | None, batch: Pass, _: AllAngles) -> Tensor:
        """[rows, hidden] → `before`, if any, and what it adds; takes part in the state of each sequence."""
        layout = self.layout
        projected = kernels.linear(x, self.project)
        gates = projected[:, layout.width + layout.values :]
        if self.gates is not None:
            gates = kernels.linear(x, self.gates)
        out = kernels.recurrence(projected, gates, layout, batch.rows, self.index, self.convolution, self.decay)
        out = kernels.gated_norm(out, projected, layout.width, self.norm, self.eps)
        return added(kernels, out, self.output, before)

    def matrices(self) -> list[Matrix]:
        """All weights."""
        return [self.project, *([] if self.gates is None else [self.gates]), self.output]


Mixer = AttentionMixer | DeltaMixer
