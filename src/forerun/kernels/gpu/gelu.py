"""What Gemma's layers do between products: gelu gates, and norms of what is added to a row."""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.norms import COLUMNS, LONGEST_ROW, blocks_of, warps_for
from forerun.kernels.gpu.overlap import after_previous, overlaps


@triton.jit
def gelu_exponent(x: typing.Any) -> typing.Any:
    """u of gelu(x) = x / (1 + e^(-u)), in the form with tanh: 2 · √(2/π) · (x + 0.044715 · x³)."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _gelu_gate(
    gate: typing.Any,
    x: typing.Any,
    out: typing.Any,
    gate_stride: typing.Any,
    x_stride: typing.Any,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    after_previous()
    opened = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = opened / (1.0 + tl.exp(-gelu_exponent(opened))) * wide
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(
    x: typing.Any,
    weight: typing.Any,
    before: typing.Any,
    out: typing.Any,
    eps: typing.Any,
    factor: typing.Any,
    x_stride: typing.Any,
    before_stride: typing.Any,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rounded after the norm, the sum and the product, as three operations would."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    after_previous()
    kind = out.dtype.element_ty
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(before + row * before_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps) * gain
    total = (residual + wide.to(kind).to(tl.float32)).to(kind).to(tl.float32) * factor
    tl.store(out + row * WIDTH + column, total.to(kind), mask=inside)


@on_its_device
def gelu_gate(gate: Tensor, x: Tensor) -> Tensor:
    """gelu(gate) · x, both [rows, width]; either may be a slice of columns."""
    rows, width = gate.shape
    assert gate.stride(1) == 1 and x.stride(1) == 1 and x.shape == gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    if rows:
        strides = gate.stride(0), x.stride(0)
        _gelu_gate[blocks_of(rows, width)](
            gate, x, out, *strides, width, COLUMNS, num_warps=4, launch_pdl=overlaps(out.device)
        )
    return out


@on_its_device
def add_norm(x: Tensor, weight: Tensor, eps: float, before: Tensor, factor: float) -> Tensor:
    """(before + rms_norm(x)) · factor for x and before [rows, width]."""
    rows, width = x.shape
    assert width <= LONGEST_ROW and x.stride(1) == 1 and before.stride(1) == 1
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        strides, early = (x.stride(0), before.stride(0)), overlaps(x.device)
        _add_norm[(rows,)](
            x, weight, before, out, eps, factor, *strides, width, block, num_warps=warps_for(block), launch_pdl=early
        )
    return out
