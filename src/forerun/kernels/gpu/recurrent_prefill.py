"""Recurrent layers in a prefill chunk of one sequence: all rows at once, in torch's own routines.

The state after the chunk is staged, see `DeviceStates`; nothing of an earlier pass is left to replay. Rows after
`Chunk.last`, where it is given, are padding: they leave the state alone, and what comes out of them is of no use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.interface import Chunk, Decay, DeltaLayout, PassRows, Staged
from forerun.kernels.prefill import chunked_delta_rule
from forerun.kernels.reference_recurrent import L2_EPS


def convolve(x: Tensor, layout: DeltaLayout, rows: PassRows, layer: int, weight: Tensor) -> Tensor:
    """silu of a causal convolution per channel of x's first columns: [rows, layout.width]; weight [window, width]."""
    chunk, staged = _staging(rows)
    past, last = layout.window - 1, chunk.last
    line = torch.cat([rows.states[layer].inputs[chunk.slot, :past], x[:, : layout.width].float()])
    total = line[: len(x)] * weight[0]
    for tap in range(1, layout.window):
        total.addcmul_(line[tap : tap + len(x)], weight[tap])
    staged.inputs[layer] = line[len(x) :] if last is None else line[last + 1 + torch.arange(past, device=x.device)]
    return F.silu(total, inplace=True).to(x.dtype)


def delta_rule(mixed: Tensor, gates: Tensor, layout: DeltaLayout, rows: PassRows, layer: int, decay: Decay) -> Tensor:
    """The recurrence over the rows of the chunk, in float32: [rows, layout.values]."""
    chunk, staged = _staging(rows)
    before = rows.states[layer].state[chunk.slot]
    answers, staged.state[layer] = chunked_delta_rule(*prepare(mixed, gates, layout, decay, chunk.last), before, layout)
    return answers.to(mixed.dtype)


def prepare(
    mixed: Tensor, gates: Tensor, layout: DeltaLayout, decay: Decay, last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries [rows, key heads · key size] and rows as they are recorded [rows, layout.record]."""
    heads = layout.value_heads
    both = mixed[:, : layout.value_column].float().unflatten(1, (2, layout.key_heads, layout.key_size))
    both = both * torch.rsqrt(both.square().sum(-1, keepdim=True) + L2_EPS)
    queries, keys = both.flatten(2).unbind(1)
    alpha = (decay.rate * F.softplus(gates[:, heads : 2 * heads].float() + decay.bias)).exp()
    beta = gates[:, :heads].float().sigmoid()
    if last is not None:
        counts = (torch.arange(len(mixed), device=mixed.device) <= last)[:, None]
        alpha, beta = alpha.where(counts, 1.0), beta.where(counts, 0.0)
    rows = torch.cat([keys, mixed[:, layout.value_column :].float(), alpha, beta], dim=1)
    return queries * layout.key_size**-0.5, rows


def _staging(rows: PassRows) -> tuple[Chunk, Staged]:
    staged = rows.stage_of(0)
    assert rows.chunk is not None and staged is not None, "state of a prefill pass is staged"
    return rows.chunk, staged
