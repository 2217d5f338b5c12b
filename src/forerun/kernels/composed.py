"""Operations made of others, for bodies that gain nothing from fusing them; a part of `ReferenceKernels`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.interface import (
    Activation,
    Decay,
    DeltaLayout,
    Expert,
    Experts,
    Joined,
    PassRows,
)
from forerun.kernels.matrix import Matrix, Table


class TorchRows:
    """Rows moved and added by torch itself, which does that with the same bits in a pass of any size."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=1)

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x[:, start:stop].contiguous()

    def pick(self, x: Tensor, rows: Tensor | None) -> Tensor:
        return x if rows is None else x[rows]

    def rule_out(self, logits: Tensor, never: Tensor) -> Tensor:
        return logits.index_fill_(1, never, float("-inf"))


class Composed(TorchRows, ABC):
    """One after another."""

    joins_gates = False

    def embed(self, tokens: Tensor, table: Table) -> Tensor:
        return table.index_select(0, tokens) if isinstance(table, Tensor) else table[tokens].float()

    @abstractmethod
    def linear(self, x: Tensor, matrix: Matrix) -> Tensor: ...

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2·width] → silu(first half) · second half."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2·width] → gelu(first half), in the form with tanh, · second half."""

    @abstractmethod
    def convolve(self, x: Tensor, layout: DeltaLayout, rows: PassRows, layer: int, weight: Tensor) -> Tensor:
        """silu of a causal convolution per channel of x's first columns: [rows, layout.width]; weight [window, width].

        Takes part in `PassRows.states`: see `RecurrentLayer`.
        """

    @abstractmethod
    def delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        rows: PassRows,
        layer: int,
        decay: Decay,
    ) -> Tensor:
        """The recurrence over the rows of each sequence; mixed [rows, layout.width] from `convolve`."""

    def recurrence(
        self,
        x: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        rows: PassRows,
        layer: int,
        convolution: Tensor,
        decay: Decay,
    ) -> Tensor:
        mixed = self.convolve(x, layout, rows, layer, convolution)
        return self.delta_rule(mixed, gates, layout, rows, layer, decay)

    def add_linear(self, x: Tensor, matrix: Matrix, before: Tensor) -> Tensor:
        return before + self.linear(x, matrix)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        before: Tensor,
        factor: float,
        then: Sequence[Tensor] = (),
        joined: Joined | None = None,
    ) -> tuple[Tensor, ...]:
        if joined is not None:
            x = self.rms_norm(x, joined.norm, eps) + self.rms_norm(joined.other, joined.other_norm, eps)
        out = before + self.rms_norm(x, weight, eps)
        out = out if factor == 1.0 else out * factor
        return (out, *(self.rms_norm(out, each, eps) for each in then))

    def gate_linear(self, x: Tensor, matrix: Matrix, own: Tensor) -> Tensor:
        return self.gelu_mul(torch.cat([self.linear(x, matrix), own], dim=1))

    def layer_inputs(
        self, seen: Tensor, scale: float, norm: Tensor, eps: float, tokens: Tensor, table: Table, table_scale: float
    ) -> Tensor:
        known = self.embed(tokens, table).to(seen.dtype) * table_scale
        wide = self.rms_norm((seen * scale).view(-1, len(norm)), norm, eps)
        own: Tensor = (wide.view(seen.shape) + known) * 2.0**-0.5
        return own

    def activate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) · up of an expert."""
        return self.silu_mul(gate_up) if activation == "silu" else self.gelu_mul(gate_up)

    def cluster_logits(self, x: Tensor, table: Tensor, clusters: Tensor) -> Tensor:
        chosen = table[clusters].flatten(1, 2).float()  # [rows, top · size, in]
        return torch.bmm(chosen, x.float()[..., None])[..., 0]

    def gated_linear(self, x: Tensor, matrix: Matrix, activation: Activation = "silu") -> Tensor:
        return self.activate(self.linear(x, matrix), activation)

    @abstractmethod
    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """cap · tanh(logits / cap) of float32 logits [rows, vocabulary]; may be done in place."""

    def logits(self, x: Tensor, matrix: Matrix, cap: float = 0.0) -> Tensor:
        found = self.linear(x, matrix).float()
        return self.soft_cap(found, cap) if cap else found

    def pack_experts(self, experts: list[Expert]) -> Experts:
        return experts
