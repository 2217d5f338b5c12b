"""The feed-forward layer of a block: one gated network, or a mixture of experts and one that all rows share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Expert, Experts, Kernels, Stacked
from forerun.kernels.matrix import FloatMatrix, Matrix


@dataclass(slots=True)
class Dense:
    """silu(gate) · up, then down."""

    network: Expert

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor, prefill: bool) -> Tensor:
        """[rows, hidden] → `before` and what it adds."""
        inner = kernels.gated_linear(x, self.network.gate_up, prefill)
        return kernels.add_linear(inner, self.network.down, before, prefill)

    @property
    def gated(self) -> Matrix:
        """What goes through `gated_linear`."""
        return self.network.gate_up

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from (self.network.gate_up, self.network.down)

    def shapes(self) -> list[Matrix]:
        """One matrix of every shape."""
        return list(self.matrices())


@dataclass(slots=True)
class Sparse:
    """A few of many experts for each row, and a shared one behind a gate."""

    router: Matrix  # [experts, hidden], never quantised: a rounding there picks another expert
    experts: Experts
    top: int
    shared: Expert
    shared_gate: Matrix  # [1, hidden], never quantised

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor, prefill: bool) -> Tensor:
        """[rows, hidden] → `before` and what it adds."""
        # Routing goes through the routine of decoding in prefill too: experts differ by far more than rounding.
        ids, weights = kernels.route(kernels.linear(x, self.router, prefill=False), self.top)
        mixed = kernels.experts(x, ids, weights, self.experts, prefill)
        inner = kernels.gated_linear(x, self.shared.gate_up, prefill)
        shared = kernels.linear(inner, self.shared.down, prefill)
        return before + (mixed + kernels.sigmoid_gate(shared, kernels.linear(x, self.shared_gate, prefill), 0))

    @property
    def gated(self) -> Matrix:
        """What goes through `gated_linear`."""
        return self.shared.gate_up

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from (self.router, self.shared.gate_up, self.shared.down, self.shared_gate)
        if isinstance(self.experts, Stacked):
            for stack in (self.experts.gate_up, self.experts.down):
                yield FloatMatrix(stack.flatten(0, 1), None)
            return
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def shapes(self) -> list[Matrix]:
        """One matrix of every shape that goes through `linear`."""
        shapes = [self.router, self.shared.gate_up, self.shared.down, self.shared_gate]
        if isinstance(self.experts, list):
            shapes += [self.experts[0].gate_up, self.experts[0].down]
        return shapes


FeedForward = Dense | Sparse
