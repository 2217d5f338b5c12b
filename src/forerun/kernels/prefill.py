"""Attention for a prefill chunk: one sequence, shapes fixed by the request, so torch's own routine serves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.kernels.interface import HeadLayout, LayerPages, Span


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
