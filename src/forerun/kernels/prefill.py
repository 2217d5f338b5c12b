"""A prefill chunk: one sequence, shapes fixed by the request, so torch's own routines serve."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from forerun.kernels.interface import AttentionSpec, DeltaLayout, LayerPages, PassRows

QUERIES = 512  # rows of a chunk that look for keys together, unless they are all there is
# cuDNN's is left out: it was not tried with keys that several heads share as a view.
ROUTINES = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DELTA_CHUNK = 64  # rows of the gated delta rule that are solved together
DELTA_ROWS = 1024  # whose chunks are worked on side by side: more would take much memory


def gather(table: Tensor, layer: LayerPages, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of the sequence of a block table [pages], from page `first` on: each [kv heads, keys, size].

    Of its first `length` keys, those of pages before `first` are left out.
    """
    page = layer.values.shape[2]
    used = table[first : -(-length // page)].long()
    keys = layer.keys[used].permute(1, 0, 3, 2).flatten(1, 2)  # [kv heads, pages · page, size]
    values = layer.values[used].permute(1, 0, 2, 3).flatten(1, 2)
    return keys[:, : length - first * page], values[:, : length - first * page]


def visible(rows: range, keys: range, window: int, device: torch.device, runs: Tensor | None = None) -> Tensor:
    """Which of `keys` each of `rows` may read, both positions: [rows, keys] bool.

    `runs` [positions]: rows of one number see each other whatever their order; -1 stands alone.
    """
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    mask = key <= row
    if runs is not None:
        mask |= (runs[row] == runs[key]) & (runs[row] >= 0)
    return mask & (key > row - window) if window else mask


def prefill_attention(qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
    """[rows, layout.width] → [rows, heads · size] for the one sequence of a prefill pass.

    Some rows at a time, each with the keys they see, so that memory and work do not grow with what they do not see.
    """
    assert rows.chunk is not None
    layout, position, page = spec.layout, rows.chunk.position, layer.values.shape[2]
    end = position + len(qkv)
    first = max(0, position + 1 - spec.window) // page if spec.window else 0  # pages before it may be gone
    keys, values = gather(rows.table(layer)[0], layer, end, first)
    queries = qkv[:, : layout.key_column].unflatten(1, (layout.heads, layout.size)).transpose(0, 1)
    runs = rows.together if spec.window else None
    if position == 0 and not spec.softcap and runs is None and (not spec.window or len(qkv) <= spec.window):
        return causal_attention(queries, keys, values, spec.scale, None).transpose(0, 1).flatten(1)
    if runs is not None:
        runs = F.pad(runs, (position, 0), value=-1)
    parts = []
    for start in range(0, len(qkv), QUERIES):
        some = queries[:, start : start + QUERIES]
        at = range(position + start, position + start + some.shape[1])
        begin = max(0, at.start + 1 - spec.window) if spec.window else 0  # the first key that any of them sees
        seen = range(begin, at.stop if runs is None else end)
        mask = visible(at, seen, spec.window, qkv.device, runs)
        here = slice(seen.start - first * page, seen.stop - first * page)
        if spec.softcap:
            parts.append(capped_attention(some, keys[:, here], values[:, here], mask, spec))
        else:
            parts.append(causal_attention(some, keys[:, here], values[:, here], spec.scale, mask))
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Attention of queries [heads, rows, size]; keys and values [kv heads, keys, size] end with the rows' own.

    Without a mask the rows are all there are. The heads that share a key head become a batch of their own whose keys
    are one view: of the routines that take masks none knows shared heads, but for one that holds all scores.
    """
    group = len(queries) // len(keys)
    keys, values = (part[:, None].expand(-1, group, -1, -1) for part in (keys, values))  # [kv heads, group, keys, size]
    with sdpa_kernel(ROUTINES):
        out = scaled_dot_product_attention(
            queries.unflatten(0, (-1, group)), keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    return out.flatten(0, 1)


def capped_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of queries [heads, rows, size] with a soft cap on scores, which torch's own routine lacks."""
    out = torch.empty_like(queries)
    group = len(queries) // len(keys)
    for head, query in enumerate(queries):  # one at a time: all scores at once would take much memory
        scores = (query @ keys[head // group].mT).float() * spec.factor
        scores = spec.softcap * (scores / spec.softcap).tanh()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[head] = weights.to(values.dtype) @ values[head // group]
    return out


def chunked_delta_rule(queries: Tensor, rows: Tensor, state: Tensor, layout: DeltaLayout) -> tuple[Tensor, Tensor]:
    """The gated delta rule over many rows at once; the same up to rounding as one after another.

    queries [rows, key heads · key size], rows [rows, layout.record] as they are recorded, state [value heads, key size,
    value size] → answers [rows, layout.values] and the state after the last row.
    """
    answers = []
    for some, recorded in zip(queries.split(DELTA_ROWS), rows.split(DELTA_ROWS), strict=True):
        answer, state = _delta_rows(some, recorded, state, layout)
        answers.append(answer)
    return torch.cat(answers), state


def _delta_rows(queries: Tensor, rows: Tensor, state: Tensor, layout: DeltaLayout) -> tuple[Tensor, Tensor]:
    """Chunks side by side, but for the state that goes from one to the next. Shapes: [chunks, heads, size, …]."""
    heads, group = layout.value_heads, layout.value_heads // layout.key_heads
    size = min(DELTA_CHUNK, len(rows))
    chunks = -(-len(rows) // size)

    def blocks(x: Tensor, parts: int) -> Tensor:
        """[rows, parts · n] → [chunks, parts, size, n]; rows that are not add nothing and fade nothing."""
        padded = F.pad(x, (0, 0, 0, chunks * size - len(x)))
        split: Tensor = padded.unflatten(1, (parts, -1)).unflatten(0, (chunks, size))
        return split.transpose(1, 2)

    keys, values, alpha, strength = rows.split([layout.key_column, layout.values, heads, heads], dim=1)
    q, k = (blocks(x, layout.key_heads).repeat_interleave(group, dim=1) for x in (queries, keys))
    v, beta = blocks(values, heads), blocks(strength, heads)
    # A decay that underflowed to zero has no logarithm; the smallest normal number fades just as completely.
    fade = blocks(alpha.clamp_min(torch.finfo(torch.float32).tiny).log(), heads)[..., 0].cumsum(2)
    faded = fade.exp()[..., None]
    between = (fade[..., None] - fade[..., None, :]).tril().exp().tril()  # decay from a row (column) to a later one
    onto = (beta * k) @ k.mT * between  # below the diagonal: what a row changes in what a later one writes
    right = torch.cat([beta * v, beta * k * faded], dim=3)
    solved = torch.linalg.solve_triangular(onto, right, upper=False, unitriangular=True)
    written, read = solved.split([layout.value_size, layout.key_size], dim=3)
    left = (k * (fade[..., -1:] - fade).exp()[..., None]).mT  # keys with the decay from their row to the last
    states, changes = [], []
    for chunk in range(chunks):
        states.append(state)
        changes.append(torch.baddbmm(written[chunk], read[chunk], state, alpha=-1))
        state = torch.baddbmm(state * faded[chunk, :, -1:], left[chunk], changes[-1])
    answers = (q * faded) @ torch.stack(states) + (q @ k.mT * between) @ torch.stack(changes)
    return answers.transpose(1, 2).flatten(2).flatten(0, 1)[: len(rows)], state
