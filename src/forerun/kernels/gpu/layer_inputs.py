"""The inputs of their own that Gemma's small models have for every layer, from the token and from its embedding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps


@triton.jit
def _layer_inputs(
    seen, norm, tokens, table, out, seen_scale, eps, table_scale, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One layer's of one row, rounded wherever operations of their own would round."""
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    kind: tl.constexpr = out.dtype.element_ty
    gain = tl.load(norm + column, mask=inside, other=0.0)
    after_previous()
    width = tl.num_programs(1) * SIZE
    place = layer * SIZE + column
    known = tl.load(table + tl.load(tokens + row) * width + place, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(seen + row * width + place, mask=inside, other=0.0).to(tl.float32)
    wide = (wide * seen_scale).to(kind).to(tl.float32)
    wide = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * gain).to(kind).to(tl.float32)
    both = (wide + (known * table_scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + row * width + place, (both * 0.7071067811865476).to(kind), mask=inside)


@on_its_device
def layer_inputs(
    seen: Tensor, seen_scale: float, norm: Tensor, eps: float, tokens: Tensor, table: Tensor, table_scale: float
) -> Tensor:
    """(rms_norm(seen · seen_scale) + table[tokens] · table_scale) / √2, normed in pieces of [size], the norm's.

    seen [rows, layers · size], table [vocabulary, layers · size], tokens [rows] int64.
    """
    rows, size = len(seen), len(norm)
    assert seen.is_contiguous() and table.is_contiguous() and seen.shape[1] == table.shape[1]
    out = torch.empty_like(seen)
    if rows:
        block = triton.next_power_of_2(size)
        scales, early = (seen_scale, eps, table_scale), overlaps(seen.device)
        _layer_inputs[(rows, seen.shape[1] // size)](
            seen, norm, tokens, table, out, *scales, size, block, num_warps=1, launch_pdl=early
        )
    return out
