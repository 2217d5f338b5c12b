"""The slow, obvious bodies of recurrent layers, gates and experts; a part of `ReferenceKernels`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.composed import Composed
from forerun.kernels.interface import Activation, Decay, DeltaLayout, Experts, PassRows, RecurrentLayer

L2_EPS = 1e-6


class RecurrentReference(Composed):
    """One row at a time, in float32."""

    def sigmoid_gate(self, x: Tensor, gate: Tensor, first: int) -> Tensor:
        rows = zip(x.split(1), gate[:, first:].split(1), strict=True)
        return torch.cat([(row.float() * mine.float().sigmoid()).to(x.dtype) for row, mine in rows])

    def convolve(self, x: Tensor, layout: DeltaLayout, rows: PassRows, layer: int, weight: Tensor) -> Tensor:
        out = torch.empty(len(x), layout.width, dtype=x.dtype, device=x.device)
        past = layout.window - 1
        mine = rows.states[layer]
        for sequence, start, count in rows.spans():
            staged = rows.stage_of(sequence)
            slot = int(rows.slot[sequence])
            inputs = mine.inputs[slot]
            keep = int(mine.kept[0, slot])
            inputs[:past] = inputs[keep : keep + past].clone()
            mine.kept[0, slot] = 0
            new = x[start : start + count, : layout.width].float()
            line = torch.cat([inputs[:past], new])
            for row in range(count):
                total = (line[row : row + layout.window] * weight).sum(0)
                out[start + row] = F.silu(total).to(x.dtype)
            if staged is None:
                inputs[past : past + count] = new
            else:
                staged.inputs[layer] = line[count:]
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
        out = torch.empty(len(mixed), layout.values, dtype=mixed.dtype, device=mixed.device)
        mine = rows.states[layer]
        for sequence, start, count in rows.spans():
            staged = rows.stage_of(sequence)
            slot = int(rows.slot[sequence])
            for row in mine.record[slot, : int(mine.kept[1, slot])]:
                mine.state[slot] = advance(mine.state[slot], row, layout)
            mine.kept[1, slot] = 0
            ready = [prepare(mixed[i], gates[i], layout, decay) for i in range(start, start + count)]
            state = mine.state[slot]
            for i, (query, row) in enumerate(ready):
                state = advance(state, row, layout)
                out[start + i] = read(state, query, layout).to(out.dtype)
            if staged is None:
                record(mine, slot, [row for _, row in ready])
            else:
                staged.state[layer] = state
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        rows = []
        for row, mine in zip(x.split(1), gate[:, first : first + x.shape[1]].split(1), strict=True):
            wide = row.float().unflatten(1, (-1, len(weight)))
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
            rows.append((wide.flatten(1) * F.silu(mine.float())).to(x.dtype))
        return torch.cat(rows)

    def route(self, logits: Tensor, top: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ids, weights = [], []
        for row in logits.float():
            largest, places = row.sort(descending=True, stable=True)
            ids.append(places[:top])
            shares = largest[:top].softmax(-1)
            weights.append(shares if scale is None else shares * scale[ids[-1]])
        return torch.stack(ids), torch.stack(weights)

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, activation: Activation = "silu"
    ) -> Tensor:
        assert isinstance(experts, list)
        out = torch.zeros_like(x, dtype=torch.float32)
        for number in ids.unique().tolist():  # ascending
            rows, places = (ids == number).nonzero(as_tuple=True)
            expert = experts[number]
            inner = self.activate(self.linear(x[rows], expert.gate_up), activation)
            part = self.linear(inner, expert.down)
            out[rows] += part.float() * weights[rows, places, None]
        return out.to(x.dtype)


def prepare(mixed: Tensor, gates: Tensor, layout: DeltaLayout, decay: Decay) -> tuple[Tensor, Tensor]:
    """Queries [key heads · size] and the row as it is recorded [layout.record]."""
    queries, keys = mixed[: layout.value_column].float().view(2, layout.key_heads, layout.key_size)
    queries = queries * torch.rsqrt(queries.square().sum(-1, keepdim=True) + L2_EPS) * layout.key_size**-0.5
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + L2_EPS)
    strength, fading = gates.float().view(2, layout.value_heads)
    alpha = (decay.rate * F.softplus(fading + decay.bias)).exp()
    values = mixed[layout.value_column :].float()
    return queries.flatten(), torch.cat([keys.flatten(), values, alpha, strength.sigmoid()])


def parts(row: Tensor, layout: DeltaLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys [..., value heads, size], values [..., value heads, size], decay and strength [..., value heads]."""
    heads = layout.value_heads
    keys, values, alpha, beta = row.split([layout.key_column, layout.values, heads, heads], dim=-1)
    return spread(keys, layout), values.unflatten(-1, (heads, layout.value_size)), alpha, beta


def spread(keys: Tensor, layout: DeltaLayout) -> Tensor:
    """Key heads shared by several value heads: [..., key heads · size] → [..., value heads, size]."""
    split: Tensor = keys.unflatten(-1, (layout.key_heads, layout.key_size))
    return split.repeat_interleave(layout.value_heads // layout.key_heads, dim=-2)


def advance(state: Tensor, row: Tensor, layout: DeltaLayout) -> Tensor:
    """One recorded row of the recurrence on state [value heads, key size, value size]."""
    keys, values, alpha, beta = parts(row, layout)
    state = state * alpha[:, None, None]
    change = beta[:, None] * (values - (state * keys[:, :, None]).sum(1))
    return state + keys[:, :, None] * change[:, None, :]


def read(state: Tensor, query: Tensor, layout: DeltaLayout) -> Tensor:
    """[value heads · value size]."""
    answer: Tensor = (state * spread(query, layout)[:, :, None]).sum(1).flatten()
    return answer


def record(layer: RecurrentLayer, slot: int, rows: list[Tensor]) -> None:
    """Keep the rows of this pass for a replay."""
    for place, row in enumerate(rows):
        layer.record[slot, place] = row
