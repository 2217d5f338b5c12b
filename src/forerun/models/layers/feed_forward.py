"""The feed-forward layer of a block: one gated network, a mixture of experts and a shared one, or experts beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Activation, Expert, Experts, Joined, Kernels, Stacked
from forerun.kernels.matrix import FloatMatrix, Matrix


def added(kernels: Kernels, x: Tensor, matrix: Matrix, before: Tensor | None) -> Tensor:
    """linear(x), added to `before` where there is one."""
    return kernels.linear(x, matrix) if before is None else kernels.add_linear(x, matrix, before)


@dataclass(slots=True)
class Dense:
    """activation(gate) · up, then down."""

    network: Expert
    activation: Activation = "silu"

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor | None) -> Tensor:
        """[rows, hidden] → `before`, if any, and what it adds."""
        inner = kernels.gated_linear(x, self.network.gate_up, self.activation)
        return added(kernels, inner, self.network.down, before)

    @property
    def gated(self) -> Matrix:
        """What goes through `gated_linear`."""
        return self.network.gate_up

    def matrices(self) -> list[Matrix]:
        """All weights."""
        return [self.network.gate_up, self.network.down]


@dataclass(slots=True)
class Sparse:
    """A few of many experts for each row, and a shared one behind a gate."""

    router: Matrix  # [experts, hidden], never quantised: a rounding there picks another expert
    experts: Experts
    top: int
    shared: Expert
    shared_gate: Matrix  # [1, hidden], never quantised
    activation: Activation = "silu"  # of all of them

    def forward(self, kernels: Kernels, x: Tensor, before: Tensor | None) -> Tensor:
        """[rows, hidden] → `before`, if any, and what it adds."""
        ids, weights = kernels.route(kernels.linear(x, self.router), self.top)
        mixed = kernels.experts(x, ids, weights, self.experts, self.activation)
        inner = kernels.gated_linear(x, self.shared.gate_up, self.activation)
        shared = kernels.linear(inner, self.shared.down)
        both = kernels.plus(mixed, kernels.sigmoid_gate(shared, kernels.linear(x, self.shared_gate), 0))
        return both if before is None else kernels.plus(before, both)

    @property
    def gated(self) -> Matrix:
        """What goes through `gated_linear`."""
        return self.shared.gate_up

    def matrices(self) -> list[Matrix]:
        """All weights but those of the experts: what every row is multiplied with."""
        return [self.router, self.shared.gate_up, self.shared.down, self.shared_gate]


@dataclass(slots=True)
class Beside:
    """A few of many experts for each row, beside a network that sees all rows; their answers are normed and added."""

    router: Matrix  # [experts, hidden], never quantised
    router_norm: Tensor  # [hidden], as all norms here
    expert_scale: Tensor  # [experts] float32, by which the weights of chosen experts are multiplied
    experts: Experts
    top: int
    activation: Activation
    input_norm: Tensor
    network_norm: Tensor
    output_norm: Tensor

    @property
    def norms(self) -> list[Tensor]:
        """Of the rows that it reads."""
        return [self.router_norm, self.input_norm]

    def forward(self, kernels: Kernels, rows: Sequence[Tensor]) -> Joined:
        """What joins the network's answer, for rows [rows, hidden] after each of `norms`."""
        routed, normed = rows
        ids, weights = kernels.route(kernels.linear(routed, self.router), self.top, self.expert_scale)
        mixed = kernels.experts(normed, ids, weights, self.experts, self.activation)
        return Joined(self.network_norm, mixed, self.output_norm)


def expert_matrices(experts: Experts) -> Iterator[Matrix]:
    """All weights."""
    if isinstance(experts, Stacked):
        for stack in (experts.gate_up, experts.down):
            yield FloatMatrix(stack.flatten(0, 1), None)
        return
    for expert in experts:
        yield from (expert.gate_up, expert.down)


FeedForward = Dense | Sparse
Mixture = Sparse | Beside
