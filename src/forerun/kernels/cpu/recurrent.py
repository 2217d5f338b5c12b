"""CPU bodies of recurrent layers, gates and experts; a part of `CpuKernels`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.kernels import compiled_recurrent as compiled
from forerun.kernels.composed import Composed
from forerun.kernels.interface import Activation, Decay, DeltaLayout, Experts, PassRows, Staged


class RecurrentCpu(Composed):
    """float32 throughout."""

    def convolve(self, x: Tensor, layout: DeltaLayout, rows: PassRows, layer: int, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), layout.width)
        mine = rows.states[layer]
        inputs, slots = mine.inputs.numpy(), rows.slot.numpy()
        for part, staged in parts_of(rows):
            final = inputs[0] if staged is None else staged.inputs[layer].numpy()
            state = inputs, mine.kept.numpy(), staged is None, final
            starts = rows.query_start.numpy()[part.start : part.stop + 1]
            compiled.convolve(x.numpy(), weight.numpy(), starts, slots[part], *state, out.numpy())
        return out

    def delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        rows: PassRows,
        layer: int,
        decay: Decay,
    ) -> Tensor:
        out = torch.empty(len(mixed), layout.values)
        queries = np.empty((len(mixed), layout.key_column), np.float32)
        prepared = np.empty((len(mixed), layout.record), np.float32)
        fading, heads = (decay.rate.numpy(), decay.bias.numpy()), (layout.key_heads, layout.key_size)
        compiled.prepare_rows(mixed.numpy(), gates.numpy(), *fading, *heads, queries, prepared)
        mine = rows.states[layer]
        matrices, slots = mine.state.numpy(), rows.slot.numpy()
        for part, staged in parts_of(rows):
            final = matrices[0] if staged is None else staged.state[layer].numpy()
            state = matrices, mine.record.numpy(), mine.kept.numpy(), staged is None, final
            starts = rows.query_start.numpy()[part.start : part.stop + 1]
            compiled.delta_rule(queries, prepared, starts, slots[part], *state, out.numpy())
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        compiled.gated_norm(x.numpy(), gate.numpy(), first, weight.numpy(), np.float32(eps), out.numpy())
        return out

    def route(self, logits: Tensor, top: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids, weights = torch.empty(len(logits), top, dtype=torch.long), torch.empty(len(logits), top)
        compiled.route(logits.numpy(), ids.numpy(), weights.numpy())
        return ids, weights if scale is None else weights * scale[ids]

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, activation: Activation = "silu"
    ) -> Tensor:
        assert isinstance(experts, list)
        out = torch.zeros_like(x)
        chosen, factors, target = ids.numpy(), weights.numpy(), out.numpy()
        for number in np.unique(chosen):  # ascending: a row's parts are added in the same order in every pass
            rows, places = np.nonzero(chosen == number)
            expert = experts[number]
            inner = self.activate(self.linear(x[torch.from_numpy(rows)], expert.gate_up), activation)
            part = self.linear(inner, expert.down)
            compiled.add_rows(part.numpy(), rows, factors[rows, places], target)
        return out


def parts_of(rows: PassRows) -> list[tuple[slice, Staged | None]]:
    """The sequences of a pass: those whose rows are recorded side by side, each that leaves its state aside alone."""
    count = len(rows.slot)
    if not rows.staged:
        return [(slice(0, count), None)]
    return [(slice(index, index + 1), staged) for index, staged in enumerate(rows.staged)]
