"""CPU bodies of recurrent layers, gates and experts; a part of `CpuKernels`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.kernels import compiled_recurrent as compiled
from forerun.kernels.composed import Composed
from forerun.kernels.interface import Decay, DeltaLayout, Experts, Rows, on_host


class RecurrentCpu(Composed):
    """float32 throughout."""

    def sigmoid_gate(self, x: Tensor, gate: Tensor, first: int) -> Tensor:
        out = torch.empty_like(x)
        compiled.sigmoid_gate(x.numpy(), gate.numpy(), first, gate.shape[1] - first == 1, out.numpy())
        return out

    def convolve(self, x: Tensor, layout: DeltaLayout, spans: Rows, layer: int, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), layout.width)
        rows, taps, target = x.numpy(), weight.numpy(), out.numpy()
        for s in on_host(spans):
            assert s.state is not None
            mine = s.state.layers[layer]
            inputs, kept = mine.inputs.numpy(), mine.kept.numpy()
            final = inputs[0] if s.state.staged is None else s.state.staged.inputs[layer].numpy()
            recorded = s.state.staged is None
            compiled.convolve(rows, taps, s.start, s.count, s.state.slot, inputs, kept, recorded, final, target)
        return out

    def delta_rule(
        self,
        mixed: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        spans: Rows,
        layer: int,
        decay: Decay,
        prefill: bool,  # noqa: ARG002 - the sequential routine is fast enough here
    ) -> Tensor:
        out = torch.empty(len(mixed), layout.values)
        rows, inputs, target = mixed.numpy(), gates.numpy(), out.numpy()
        rate, bias = decay.rate.numpy(), decay.bias.numpy()
        for s in on_host(spans):
            assert s.state is not None
            mine = s.state.layers[layer]
            queries = np.empty((s.count, layout.key_column), np.float32)
            prepared = np.empty((s.count, layout.record), np.float32)
            heads = layout.key_heads, layout.key_size
            compiled.prepare_rows(rows, inputs, rate, bias, s.start, s.count, *heads, queries, prepared)
            state, record, kept = mine.state.numpy(), mine.record.numpy(), mine.kept.numpy()
            final = state[0] if s.state.staged is None else s.state.staged.state[layer].numpy()
            recorded = s.state.staged is None
            slot = s.state.slot
            compiled.delta_rule(queries, prepared, s.start, slot, state, record, kept, recorded, final, target)
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        compiled.gated_norm(x.numpy(), gate.numpy(), first, weight.numpy(), np.float32(eps), out.numpy())
        return out

    def route(self, logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
        ids, weights = torch.empty(len(logits), top, dtype=torch.long), torch.empty(len(logits), top)
        compiled.route(logits.numpy(), ids.numpy(), weights.numpy())
        return ids, weights

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, prefill: bool) -> Tensor:
        assert isinstance(experts, list)
        out = torch.zeros_like(x)
        chosen, factors, target = ids.numpy(), weights.numpy(), out.numpy()
        for number in np.unique(chosen):  # ascending: a row's parts are added in the same order in every pass
            rows, places = np.nonzero(chosen == number)
            expert = experts[number]
            inner = self.silu_mul(self.linear(x[torch.from_numpy(rows)], expert.gate_up, prefill))
            part = self.linear(inner, expert.down, prefill)
            compiled.add_rows(part.numpy(), rows, factors[rows, places], target)
        return out
