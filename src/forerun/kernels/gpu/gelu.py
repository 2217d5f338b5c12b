"""Gelu gates, in the form with tanh."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.norms import on_columns
from forerun.kernels.gpu.overlap import after_previous


@triton.jit
def gelu_exponent(x):
    """u of gelu(x) = x / (1 + e^(-u)), in the form with tanh: 2 · √(2/π) · (x + 0.044715 · x³)."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def _gelu_gate(gate, x, out, gate_stride, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    after_previous()
    opened = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = opened / (1.0 + tl.exp(-gelu_exponent(opened))) * wide
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def gelu_gate(gate: Tensor, x: Tensor) -> Tensor:
    """gelu(gate) · x, both [rows, width]; either may be a slice of columns."""
    assert gate.stride(1) == 1 and x.stride(1) == 1 and x.shape == gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return on_columns(_gelu_gate, out, gate, x, out, gate.stride(0), x.stride(0))
