"""A prefill chunk: one sequence, shapes fixed by the request, so torch's own routines serve."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.kernels.interface import DeltaLayout, HeadLayout, LayerPages, Span


def gather(span: Span, layer: LayerPages, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a sequence, each [kv heads, length, size]."""
    page = layer.values.shape[2]
    used = span.pages[: -(-length // page)].long()
    keys = layer.keys[used].permute(1, 0, 3, 2).flatten(1, 2)  # [kv heads, pages · page, size]
    values = layer.values[used].permute(1, 0, 2, 3).flatten(1, 2)
    return keys[:, :length], values[:, :length]


def visible(position: int, count: int, length: int, window: int, device: torch.device) -> Tensor:
    """Which of `length` keys each of `count` rows may read: [count, length] bool."""
    row = torch.arange(position, position + count, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    mask = key <= row
    return mask & (key > row - window) if window else mask


def prefill_attention(qkv: Tensor, layout: HeadLayout, span: Span, layer: LayerPages, window: int) -> Tensor:
    """[rows, layout.width] → [rows, heads · size] for the one sequence of a prefill pass."""
    length = span.position + span.count
    keys, values = gather(span, layer, length)
    queries = qkv[:, : layout.key_column].unflatten(1, (layout.heads, layout.size)).transpose(0, 1)
    if span.position == 0 and not window:
        out = scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True, enable_gqa=True)
    else:
        mask = visible(span.position, span.count, length, window, qkv.device)
        out = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def chunked_delta_rule(
    queries: Tensor, rows: Tensor, state: Tensor, layout: DeltaLayout, size: int = 64
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over many rows at once, `size` at a time; the same up to rounding as one after another.

    queries [rows, key heads · key size], rows [rows, layout.record] as they are recorded, state [value heads, key size,
    value size] → answers [rows, layout.values] and the state after the last row.
    """
    answers = []
    for q, row in zip(queries.split(size), rows.split(size), strict=True):
        answer, state = _delta_chunk(q, row, state, layout)
        answers.append(answer)
    return torch.cat(answers), state


def _delta_chunk(queries: Tensor, rows: Tensor, state: Tensor, layout: DeltaLayout) -> tuple[Tensor, Tensor]:
    heads, group = layout.value_heads, layout.value_heads // layout.key_heads
    parts = rows.split([layout.key_column, layout.values, heads, heads], dim=1)
    q, k = (
        part.unflatten(1, (layout.key_heads, layout.key_size)).repeat_interleave(group, dim=1).transpose(0, 1)
        for part in (queries, parts[0])
    )  # [heads, rows, key size]
    v = parts[1].unflatten(1, (heads, layout.value_size)).transpose(0, 1)  # [heads, rows, value size]
    beta = parts[3].T[..., None]  # [heads, rows, 1]
    # A decay that underflowed to zero has no logarithm; the smallest normal number fades just as completely.
    fade = parts[2].T.clamp_min(torch.finfo(torch.float32).tiny).log().cumsum(1)  # [heads, rows]
    between = (fade[:, :, None] - fade[:, None, :]).tril().exp().tril()  # decay from a row (column) to a later one
    onto = ((beta * k) @ k.transpose(1, 2) * between).tril(-1)
    identity = torch.eye(len(rows), device=rows.device)
    right = torch.cat([beta * v, beta * k * fade.exp()[..., None]], dim=2)
    solved = torch.linalg.solve_triangular(identity + onto, right, upper=False, unitriangular=True)
    written, read = solved.split([layout.value_size, layout.key_size], dim=2)
    change = written - read @ state  # [heads, rows, value size]
    answer = (q * fade.exp()[..., None]) @ state + (q @ k.transpose(1, 2) * between) @ change
    left = (fade[:, -1:] - fade).exp()[..., None]  # decay from each row to the last
    state = state * fade[:, -1:, None].exp() + (k * left).transpose(1, 2) @ change
    return answer.transpose(0, 1).flatten(1), state
