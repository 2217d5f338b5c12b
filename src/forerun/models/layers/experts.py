"""The feed-forward layer of a block: one gated network, or a mixture of experts and one that all rows share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Expert, Kernels
from forerun.kernels.matrix import Matrix


@dataclass(slots=True)
class Dense:
    """silu(gate) · up, then down."""

    network: Expert

    def forward(self, kernels: Kernels, x: Tensor, prefill: bool) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        return run_expert(kernels, self.network, x, prefill)

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
    experts: list[Expert]
    top: int
    shared: Expert
    shared_gate: Matrix  # [1, hidden], never quantised

    def forward(self, kernels: Kernels, x: Tensor, prefill: bool) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        # Routing goes through the routine of decoding in prefill too: experts differ by far more than rounding.
        ids, weights = kernels.route(kernels.linear(x, self.router, prefill=False), self.top)
        mixed = kernels.experts(x, ids, weights, self.experts, prefill)
        shared = run_expert(kernels, self.shared, x, prefill)
        return mixed + kernels.sigmoid_gate(shared, kernels.linear(x, self.shared_gate, prefill), 0)

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from (self.router, self.shared.gate_up, self.shared.down, self.shared_gate)
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def shapes(self) -> list[Matrix]:
        """One matrix of every shape."""
        one = self.experts[0]
        return [self.router, self.shared.gate_up, self.shared.down, self.shared_gate, one.gate_up, one.down]


FeedForward = Dense | Sparse


def run_expert(kernels: Kernels, expert: Expert, x: Tensor, prefill: bool) -> Tensor:
    """One gated network on all rows."""
    return kernels.linear(kernels.silu_mul(kernels.linear(x, expert.gate_up, prefill)), expert.down, prefill)
