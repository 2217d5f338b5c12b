"""Attention of an unrolled draft step: true entries up to the base position, then the base's own chain.

At step j the query of base s sees the step-0 keys of positions ≤ s (one causal attention over the sequence) and the
keys that its own steps 1 … j made. The first part runs through the fused attention kernel, the second is a few
products per position, and the two are merged by their log-sum-exp. The kernel's backward pass is handed the *merged*
output and log-sum-exp: with those it yields exactly the step-0 keys' share of the gradient.

Bases inside a prompt are never drafted from, so queries are those of the last positions alone; the kernel, which aligns
queries and keys at their beginnings, gets empty ones in front.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


class ChainAttention(torch.autograd.Function):
    """keys, values [rows, heads, length, size]; query [rows, heads, last, size], of the last positions.

    Chain keys and values [rows, heads, steps, last, size].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:  # type: ignore[override]
        scale = 1 / math.sqrt(query.shape[-1])
        first, base, extra = _flash(query, keys, values)
        scores = (query.unsqueeze(2) * chain_k).sum(-1, dtype=torch.float32) * scale  # [rows, heads, steps, last]
        whole = torch.logaddexp(base, scores.logsumexp(dim=2))
        weights = (scores - whole.unsqueeze(2)).exp().to(query.dtype).unsqueeze(-1)
        out = first * (base - whole).exp().to(query.dtype).unsqueeze(-1) + (weights * chain_v).sum(2)
        ctx.save_for_backward(query, keys, values, chain_k, chain_v, out, whole, weights, *extra[:2], *extra[4:])
        ctx.sizes = extra[2:4]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        query, keys, values, chain_k, chain_v, out, whole, weights, *extra = ctx.saved_tensors
        scale = 1 / math.sqrt(query.shape[-1])
        grad = grad.contiguous()
        extra = [*extra[:2], *ctx.sizes, *extra[2:]]
        query_grad, key_grad, value_grad = _flash_backward(grad, query, keys, values, out, whole, extra)
        towards = grad.unsqueeze(2)
        change = (towards * chain_v).sum(-1) - (grad * out).sum(-1).unsqueeze(2)
        score_grad = weights * (change * scale).unsqueeze(-1)
        query_grad = query_grad + (score_grad * chain_k).sum(2)
        return query_grad, key_grad, value_grad, score_grad * query.unsqueeze(2), weights * towards


def _flash(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
    """Causal attention, its log-sum-exp, and what the backward pass wants to see again."""
    before = keys.shape[2] - query.shape[2]
    query = _padded(query, before)
    if query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True)
        out, base, *extra = found
        return out[:, :, before:], base[:, :, before:], extra[:6]
    out, base = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, True)
    return out[:, :, before:], base[:, :, before:], []


def _padded(rows: Tensor, before: int) -> Tensor:
    """Rows [rows, heads, last, size] with zeros in front, one for each position before."""
    return F.pad(rows, (0, 0, before, 0)) if before else rows


def _flash_backward(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, whole: Tensor, extra: list[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    before = keys.shape[2] - query.shape[2]
    # A gradient of zero makes the rows in front count for nothing.
    grad, query, out = (_padded(rows, before).contiguous() for rows in (grad, query, out))
    whole = F.pad(whole, (before, 0)).contiguous() if before else whole
    if query.device.type == "cuda":
        queries_at, keys_at, queries, length, seed, offset = extra
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, keys, values, out, whole, queries_at, keys_at, queries, length, 0.0, True, seed, offset
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, keys, values, out, whole, 0.0, True
        )
    return found[0][:, :, before:], found[1], found[2]


def fused_chain(query: Tensor, keys: Tensor, values: Tensor, chain_k: Tensor | None, chain_v: Tensor | None) -> Tensor:
    """Attention of a step; without a chain (step 0) plain causal attention."""
    if chain_k is None or chain_v is None:
        before = keys.shape[2] - query.shape[2]
        mixed = F.scaled_dot_product_attention(_padded(query, before), keys, values, is_causal=True)
        return mixed[:, :, before:]
    out = ChainAttention.apply(query, keys, values, chain_k, chain_v)
    assert isinstance(out, Tensor)
    return out


def plain_chain(query: Tensor, keys: Tensor, values: Tensor, chain_k: Tensor | None, chain_v: Tensor | None) -> Tensor:
    """The same in plain operations: the oracle, and what runs where the fused kernels do not."""
    scale = 1 / math.sqrt(query.shape[-1])
    length = keys.shape[2]
    before = length - query.shape[2]
    hidden = torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device).triu(1 + before)
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(hidden, float("-inf"))
    if chain_k is None or chain_v is None:
        return scores.softmax(-1).to(query.dtype) @ values
    own = (query.unsqueeze(2) * chain_k).sum(-1, dtype=torch.float32) * scale  # [rows, heads, steps, last]
    weights = torch.cat((scores, own.transpose(2, 3)), dim=-1).softmax(-1).to(query.dtype)
    mixed = weights[..., length:].transpose(2, 3).unsqueeze(-1) * chain_v
    return weights[..., :length] @ values + mixed.sum(2)


def fused_works(heads: int, size: int, device: torch.device, dtype: torch.dtype) -> str:
    """Empty when the fused path gives the plain path's results and gradients on this machine, else what is wrong."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    flat = [draw(2, heads, 50, size), draw(2, heads, 70, size), draw(2, heads, 70, size)]
    chain = [draw(2, heads, 3, 50, size) for _ in range(2)]
    towards = draw(2, heads, 50, size).detach()
    try:
        found = _with_gradients(fused_chain, flat, chain, towards)
        wide = [[tensor.detach().float().requires_grad_() for tensor in group] for group in (flat, chain)]
        expected = _with_gradients(plain_chain, wide[0], wide[1], towards.float())
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for mine, right in zip(found, expected, strict=True):
        wrong = float((mine.float() - right).norm() / right.norm())
        if not wrong < TOLERANCE[dtype]:
            return f"the fused attention is off by {wrong:.2g}"
    return ""


def _with_gradients(attention: Any, flat: list[Tensor], chain: list[Tensor], towards: Tensor) -> list[Tensor]:
    out = attention(*flat, *chain)
    return [out.detach(), *torch.autograd.grad(out, [*flat, *chain], towards)]
