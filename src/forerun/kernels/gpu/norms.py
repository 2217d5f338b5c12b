"""Embedding, norms, activations and gates: the element-wise operations around products, in float32 inside.

One program per row, per head of a row, or per block of columns of a row: the row count is the grid and nothing else.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps

COLUMNS = 1024  # of a row in one program of an element-wise operation
LONGEST_ROW = 16384  # that a norm holds in one program


@triton.jit
def _embed(tokens, table, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    value = tl.load(table + token * WIDTH + column, mask=column < WIDTH)
    tl.store(out + row * WIDTH + column, value, mask=column < WIDTH)


@triton.jit
def _rms_norm(x, weight, out, eps, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    after_previous()
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps) * factor
    tl.store(out + row * WIDTH + column, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    after_previous()
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_gate(x, gate, out, x_stride, gate_stride, SHARED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    after_previous()
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        mine = tl.load(gate + row * gate_stride).to(tl.float32)
    else:
        mine = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = wide * (1.0 / (1.0 + tl.exp(-mine)))
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm(
    x, gate, weight, out, eps, x_stride, gate_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    first = tl.program_id(1) * SIZE
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    after_previous()
    wide = tl.load(x + row * x_stride + first + column, mask=inside, other=0.0).to(tl.float32)
    mine = tl.load(gate + row * gate_stride + first + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * factor
    wide = wide * (mine / (1.0 + tl.exp(-mine)))
    tl.store(out + row * (HEADS * SIZE) + first + column, wide.to(out.dtype.element_ty), mask=inside)


@on_its_device
def on_columns(kernel: Any, out: Tensor, *arguments: Any) -> Tensor:
    """Launch an element-wise operation that writes `out` [rows, width]: a program takes a block of columns of a row."""
    rows, width = out.shape
    if rows:
        grid = rows, triton.cdiv(width, COLUMNS)
        kernel[grid](*arguments, width, COLUMNS, num_warps=4, launch_pdl=overlaps(out.device))
    return out


@on_its_device
def on_heads(kernel: Any, out: Tensor, size: int, *arguments: Any) -> Tensor:
    """Launch an operation that writes `out` [rows, heads · size]: a program holds a head of a row, or all of it."""
    rows, heads = len(out), out.shape[1] // size
    if rows:
        block = triton.next_power_of_2(size)
        warps = max(1, min(16, block // 512))  # 16 columns for each thread of a wide one
        kernel[rows, heads](*arguments, size, block, num_warps=warps, launch_pdl=overlaps(out.device))
    return out


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows [rows, width] of table [vocab, width]; tokens [rows] int64."""
    assert table.is_contiguous()
    out = torch.empty(len(tokens), table.shape[1], dtype=table.dtype, device=table.device)
    return on_columns(_embed, out, tokens, table, out)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, width] → [rows, width]; x may be a slice of columns."""
    width = x.shape[1]
    assert width <= LONGEST_ROW and x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return on_heads(_rms_norm, out, width, x, weight, out, eps, x.stride(0))


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 · width] → silu(first half) · second half: [rows, width]."""
    assert gate_up.stride(1) == 1
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    return on_columns(_silu_mul, out, gate_up, out, gate_up.stride(0))


def sigmoid_gate(x: Tensor, gate: Tensor, first: int) -> Tensor:
    """x [rows, width] · sigmoid of columns `first` and following of gate; a gate with one column left is shared."""
    left = gate.shape[1] - first
    assert left in (1, x.shape[1]) and x.stride(1) == 1 and gate.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return on_columns(_sigmoid_gate, out, x, gate[:, first:], out, x.stride(0), gate.stride(0), left == 1)


def gated_norm(x: Tensor, gate: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head of x [rows, heads · size], times weight, times silu of gate's columns from `first`."""
    rows, size = len(x), len(weight)
    heads = x.shape[1] // size
    assert x.stride(1) == 1 and gate.stride(1) == 1
    out = torch.empty(rows, heads * size, dtype=x.dtype, device=x.device)
    return on_heads(_gated_norm, out, size, x, gate[:, first:], weight, out, eps, x.stride(0), gate.stride(0), heads)
