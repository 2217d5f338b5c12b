"""What is added to a row in Gemma's layers is normed before, and the row after: all of it in one launch.

Rounded wherever operations of their own would round.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.norms import LONGEST_ROW, on_heads
from forerun.kernels.gpu.overlap import after_previous
from forerun.kernels.interface import Joined

MOST = 3  # norms of the sum


@triton.jit
def _normed(row, gain, eps, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """RMS norm of a row [BLOCK] in float32, rounded."""
    return (row * tl.rsqrt(tl.sum(row * row, axis=0) / WIDTH + eps) * gain).to(KIND).to(tl.float32)


@triton.jit
def _gain(weight, column, WIDTH: tl.constexpr):
    return tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _add_norm(
    x,
    weight,
    before,
    out,
    own_norm,  # of x, where `other` is joined
    other,
    other_norm,
    first_weight,  # of the norms of the sum, and where they go; None beyond the last
    first,
    second_weight,
    second,
    third_weight,
    third,
    eps,
    factor,
    x_stride,
    before_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. Weights are older than the kernel before this one, which may still run."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind: tl.constexpr = out.dtype.element_ty
    gain = _gain(weight, column, WIDTH)
    if first is not None:
        first_gain = _gain(first_weight, column, WIDTH)
    if second is not None:
        second_gain = _gain(second_weight, column, WIDTH)
    if third is not None:
        third_gain = _gain(third_weight, column, WIDTH)
    if other is not None:
        own_gain = _gain(own_norm, column, WIDTH)
        other_gain = _gain(other_norm, column, WIDTH)
    after_previous()
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(before + row * before_stride + column, mask=inside, other=0.0).to(tl.float32)
    if other is not None:
        beside = tl.load(other + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        wide = _normed(wide, own_gain, eps, WIDTH, kind) + _normed(beside, other_gain, eps, WIDTH, kind)
        wide = wide.to(kind).to(tl.float32)
    total = (residual + _normed(wide, gain, eps, WIDTH, kind)).to(kind).to(tl.float32) * factor
    total = total.to(kind).to(tl.float32)
    place = row * WIDTH + column
    tl.store(out + place, total.to(kind), mask=inside)
    if first is not None:
        tl.store(first + place, _normed(total, first_gain, eps, WIDTH, kind).to(kind), mask=inside)
    if second is not None:
        tl.store(second + place, _normed(total, second_gain, eps, WIDTH, kind).to(kind), mask=inside)
    if third is not None:
        tl.store(third + place, _normed(total, third_gain, eps, WIDTH, kind).to(kind), mask=inside)


def add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    before: Tensor,
    factor: float,
    then: Sequence[Tensor] = (),
    joined: Joined | None = None,
) -> tuple[Tensor, ...]:
    """(before + rms_norm(x)) · factor for x and before [rows, width], and its norms with the weights `then`.

    Where something is joined, x is rms_norm(x) + rms_norm(other) first.
    """
    rows, width = x.shape
    assert width <= LONGEST_ROW and x.stride(1) == 1 and before.stride(1) == 1 and len(then) <= MOST
    assert joined is None or joined.other.is_contiguous()
    out, *normed = (torch.empty(rows, width, dtype=x.dtype, device=x.device) for _ in range(1 + len(then)))
    own = (None, None, None) if joined is None else (joined.norm, joined.other, joined.other_norm)
    pairs = [part for pair in zip(then, normed, strict=True) for part in pair]
    sums = *pairs, *[None] * (2 * MOST - len(pairs))
    strides = x.stride(0), before.stride(0)
    on_heads(_add_norm, out, width, x, weight, before, out, *own, *sums, eps, factor, *strides)
    return (out, *normed)
