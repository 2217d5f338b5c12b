"""More CPU loops: activations and caps that not every family has. The rules of `compiled` hold."""

from __future__ import annotations

import math

import numpy as np

from forerun.compilation import jit
from forerun.kernels.compiled import CONTRACT, ONE, TWO, exponential

# 0.5 · (1 + tanh(u)) is 1 / (1 + e^(-2u)); of gelu's tanh form u is √(2/π) · (x + 0.044715 · x³).
STEEP = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(0.044715)


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def gelu_mul(gate_up, out):  # type: ignore[no-untyped-def]
    """out = gelu(gate) · up for gate_up [rows, 2·width], gate first."""
    width = out.shape[1]
    for r in range(out.shape[0]):
        gate = gate_up[r, :width]
        up = gate_up[r, width:]
        target = out[r]
        for i in range(width):
            x = gate[i]
            target[i] = x / (ONE + exponential(-STEEP * (x + CUBIC * x * x * x))) * up[i]


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def soft_cap(x, cap):  # type: ignore[no-untyped-def]
    """x ← cap · tanh(x / cap), for x [rows, width]."""
    steep = TWO / cap
    for r in range(x.shape[0]):
        row = x[r]
        for i in range(row.shape[0]):
            row[i] = cap * (ONE - TWO / (exponential(row[i] * steep) + ONE))
