"""Kernels of recurrent layers: the compiled bodies against the reference, and rows that do not see their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import recurrent
from torch import Tensor

from forerun.cache.recurrent import StateSlots
from forerun.kernels import compiled_recurrent as compiled
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import Decay, DeltaLayout, Expert
from forerun.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")
LAYOUT = DeltaLayout(key_heads=2, value_heads=6, key_size=13, value_size=21, window=4)
WIDE = DeltaLayout(key_heads=1, value_heads=2, key_size=8, value_size=200, window=3)
Body = CpuKernels | ReferenceKernels


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


class Recurrence:
    """One recurrent layer with random weights, and a sequence in it."""

    def __init__(self, kernels: Body, layout: DeltaLayout) -> None:
        self.kernels, self.layout = kernels, layout
        self.slots = StateSlots(layout, 1, 3, CPU)
        self.decay = Decay(-random(layout.value_heads, seed=1).exp(), random(layout.value_heads, seed=2))
        self.weight = random(layout.window, layout.width, seed=3)

    def run(self, work: list[tuple[int, Tensor, Tensor]], keep: int | None) -> Tensor:
        """Rows of several slots in one pass."""
        staged = [self.slots.stage(slot, len(x), prompt=False) for slot, x, _ in work]
        rows = recurrent([(slot, len(x)) for slot, x, _ in work], self.slots.layers, staged[0], CPU)
        x, gates = (torch.cat([part[place] for part in work]) for place in (1, 2))
        mixed = self.kernels.convolve(x, self.layout, rows, 0, self.weight)
        out = self.kernels.delta_rule(mixed, gates, self.layout, rows, 0, self.decay)
        for (slot, mine, _), stage in zip(work, staged, strict=True):
            self.slots.commit(slot, stage, len(mine) if keep is None else keep)
        return out


def inputs(layout: DeltaLayout, rows: int, seed: int = 9) -> tuple[Tensor, Tensor]:
    """Projected rows, with columns after the convolved ones, and gates."""
    return random(rows, layout.width + 5, seed=seed), random(rows, 2 * layout.value_heads, seed=seed + 1)


@pytest.mark.parametrize("layout", [LAYOUT, WIDE], ids=["small", "wide values"])
def test_the_recurrence_agrees_with_the_reference(layout: DeltaLayout) -> None:
    x, gates = inputs(layout, 90)
    ours, theirs = Recurrence(CpuKernels(False), layout), Recurrence(ReferenceKernels(), layout)
    for recurrence in (ours, theirs):
        recurrence.slots.take()
    for begin, end in [(0, 70), (70, 71), (71, 80), (80, 90)]:
        work = [(0, x[begin:end], gates[begin:end])]
        torch.testing.assert_close(ours.run(work, None), theirs.run(work, None), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kernels", [CpuKernels(False), ReferenceKernels()], ids=["cpu", "reference"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), min_size=1, max_size=6))
def test_any_split_and_any_rollback_gives_the_same_bits(kernels: Body, passes: list[tuple[int, int]]) -> None:
    """Rows that were kept come out as one by one, whatever was written and dropped, with a neighbour in the pass."""
    x, gates = inputs(LAYOUT, 120)
    other = inputs(LAYOUT, 16, seed=20)
    alone, mixed = Recurrence(kernels, LAYOUT), Recurrence(kernels, LAYOUT)
    place, slot, neighbour = alone.slots.take(), mixed.slots.take(), mixed.slots.take()
    at = 0
    for width, keep in passes:
        keep = min(keep, width)
        work = [(neighbour, other[0][:width], other[1][:width]), (slot, x[at : at + width], gates[at : at + width])]
        rows = mixed.run(work, keep)[width:]
        for row in range(keep):
            expected = alone.run([(place, x[at + row : at + row + 1], gates[at + row : at + row + 1])], 1)
            assert torch.equal(rows[row], expected[0])
        at += keep


@settings(deadline=None)
@given(st.floats(-90, 90, width=32))
def test_softplus_and_sigmoid(x: float) -> None:
    value = np.float32(x)
    torch.testing.assert_close(
        torch.tensor(compiled.softplus(value)), torch.nn.functional.softplus(torch.tensor(x)), rtol=3e-6, atol=1e-30
    )
    torch.testing.assert_close(torch.tensor(compiled.sigmoid(value)), torch.tensor(x).sigmoid(), rtol=3e-6, atol=1e-30)


def test_gates_and_gated_norm_agree_with_the_reference() -> None:
    x, gate = random(5, 42), random(5, 60, seed=1)
    ours, theirs = CpuKernels(False), ReferenceKernels()
    torch.testing.assert_close(
        ours.sigmoid_gate(x, gate[:, :45].contiguous(), 3), theirs.sigmoid_gate(x, gate[:, :45], 3)
    )
    one = random(5, 1, seed=2)
    torch.testing.assert_close(ours.sigmoid_gate(x, one, 0), theirs.sigmoid_gate(x, one, 0))
    weight = random(21, seed=3)
    torch.testing.assert_close(ours.gated_norm(x, gate, 7, weight, 1e-6), theirs.gated_norm(x, gate, 7, weight, 1e-6))


def test_routing_breaks_ties_by_number() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0], [3.0, 3.0, 3.0, 3.0]])
    for kernels in (CpuKernels(False), ReferenceKernels()):
        ids, weights = kernels.route(logits, 3)
        assert ids.tolist() == [[1, 2, 0], [0, 1, 2]]
        torch.testing.assert_close(weights, logits.gather(1, ids).softmax(-1))


@pytest.mark.parametrize("kernels", [CpuKernels(True), CpuKernels(False), ReferenceKernels()])
def test_experts_do_not_see_how_many_rows_they_get(kernels: Body) -> None:
    experts = [
        Expert(kernels.matrix(random(24, 20, seed=n), None), kernels.matrix(random(20, 12, seed=50 + n), None))
        for n in range(5)
    ]
    x = random(9, 20, seed=99)
    ids, weights = kernels.route(random(9, 5, seed=98), 3)
    together = kernels.experts(x, ids, weights, experts)
    for row in range(9):
        here = slice(row, row + 1)
        assert torch.equal(kernels.experts(x[here], ids[here], weights[here], experts), together[here])
    dense = torch.zeros_like(together)
    for row in range(9):
        for number, weight in zip(ids[row].tolist(), weights[row], strict=True):
            inner = kernels.silu_mul(kernels.linear(x[row : row + 1], experts[number].gate_up))
            dense[row] += weight * kernels.linear(inner, experts[number].down)[0]
    torch.testing.assert_close(together, dense)
