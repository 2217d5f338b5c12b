"""Products that keep bits on a GPU: fixed tiles and a fixed split over the inputs, whatever the number of rows.

An output element is one sum: tiles of the inputs in order within a split, then the splits in order. That order depends
on the matrix alone. More rows mean more tiles of rows; a tile never looks at another. Whichever program finishes last
adds the splits of an element, in the order of the splits, so that a product is one launch.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forerun.kernels.gpu.gelu import gelu_exponent
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import let_next_in, overlaps, wait_for_previous
from forerun.kernels.matrix import FloatMatrix

MULTIPROCESSORS = 132  # tilings are chosen for a large GPU; a smaller one runs the same programs in more waves
NARROW = 10_000_000  # weights: programs of a smaller matrix take fewer outputs, and shorter splits where they must
ROWS = 16  # the smallest tile a tensor core takes
COPIED = 16  # bytes: rows of a tile that are copied in bulk start at multiples of it


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up. The splits decide the bits: they are a function of the matrix alone."""

    rows: int  # per program
    outputs: int  # per program
    inputs: int  # per step
    splits: int
    warps: int
    stages: int


@cache
def tiling(outputs: int, inputs: int, gated: bool, tile: int = ROWS) -> Tiling:
    """One split where that keeps every multiprocessor busy, else more, up to about two programs for each of them.

    Splits are added up in the end, which takes longer the more rows there are, and twice as long for a gated matrix: a
    small one has only one. Constants are measured on an H200.
    """
    narrow = gated or outputs < 2048 or outputs * inputs < NARROW
    width = 32 if narrow else 64
    small = inputs < 1024
    step = 64 if tile > ROWS or (small and not gated) else 128
    programs, splits = -(-outputs // (2 * width if gated else width)), 1
    if not (programs >= 1.2 * MULTIPROCESSORS or (small and gated)):
        shortest = 64 if small else 128 if narrow else 1024
        wanted = min(8, 1.8 * MULTIPROCESSORS / programs, inputs / shortest)
        splits = next(count for count in (2, 4, 6, 8) if count >= wanted)
        splits = -(-inputs // split_inputs(inputs, splits))  # those that have any
        if programs * splits < MULTIPROCESSORS and width == 32:
            width, programs = 16, -(-outputs // 16)
    few = not gated and programs * splits < 1.5 * MULTIPROCESSORS  # then each has more on its way
    return Tiling(tile, width, step, splits, 4, 4 if few or step == 64 else 3)


def row_tile(rows: int) -> int:
    """Rows per program. Tensor cores add up an output's inputs in one order whatever the tile; the tests measure it."""
    return next((tile for tile in (16, 32, 64) if rows <= tile), 128)


@triton.jit(do_not_specialize=["rows", "residual_stride"])
def _product(
    x,  # [rows, INPUTS], as a descriptor of its tiles; weight too
    weight,
    bias,
    residual,  # what is added to the result, or what gates of it open
    out,
    partial,
    counters,
    rows,
    residual_stride,
    OUTPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATES: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """OUTPUTS counts columns of the result; a gated matrix has twice as many rows, gates first."""
    block, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = split * SPLIT_INPUTS
    wait_for_previous()
    total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    gate_total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    for step in range(SPLIT_INPUTS // IN_TILE):
        place = first + step * IN_TILE
        values = x.load([tile * ROW_TILE, place])  # zeros beyond the edges
        if GATED:
            gates = weight.load([block * OUT_TILE, place])
            gate_total = tl.dot(values, gates.T, gate_total, input_precision=PRECISION)
            weights = weight.load([OUTPUTS + block * OUT_TILE, place])
        else:
            weights = weight.load([block * OUT_TILE, place])
        total = tl.dot(values, weights.T, total, input_precision=PRECISION)
    let_next_in()  # not before: two kernels that read weights at once hinder each other

    row = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    column = block * OUT_TILE + tl.arange(0, OUT_TILE)
    inside, live = column < OUTPUTS, row < rows
    mask = live[:, None] & inside[None, :]
    if SPLITS > 1:
        plane = rows.to(tl.int64) * OUTPUTS
        mine = partial + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(mine + split * plane, total, mask=mask)
        if GATED:
            tl.store(mine + (SPLITS + split) * plane, gate_total, mask=mask)
        tl.debug_barrier()  # all of this program's sums are written before it is counted
        counter = counters + tile * tl.num_programs(0) + block
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(counter, 0)
        total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
        gate_total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(mine + other * plane, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                gate_total += tl.load(mine + (SPLITS + other) * plane, mask=mask, other=0.0, cache_modifier=".cg")

    kind = x.dtype
    if BIAS:
        up: tl.constexpr = OUTPUTS if GATED else 0
        total += tl.load(bias + up + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate_total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:  # each product is rounded as if it stood alone
        gate = gate_total.to(kind).to(tl.float32)
        steep = gelu_exponent(gate) if GELU else gate
        total = total.to(kind).to(tl.float32) * (gate / (1.0 + tl.exp(-steep)))
    if RESIDUAL:
        residual_at = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        beside = tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)
        alone = total.to(kind).to(tl.float32)
        if GATES:
            total = alone / (1.0 + tl.exp(-gelu_exponent(alone))) * beside
        else:
            total = alone + beside
    if CAP > 0:  # CAP · tanh(total / CAP), with tanh(u) = 1 − 2 / (e^(2u) + 1)
        total = CAP * (1.0 - 2.0 / (tl.exp(total * (2.0 / CAP)) + 1.0))
    tl.store(out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :], total, mask=mask)


class Products:
    """Launches products; holds the counters that tell a program whether it is the last of its splits."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)

    @on_its_device
    def __call__(
        self,
        x: Tensor,
        matrix: FloatMatrix,
        *,
        gated: bool = False,
        gelu: bool = False,
        residual: Tensor | None = None,
        gates: Tensor | None = None,
        dtype: torch.dtype | None = None,
        cap: float = 0.0,
        cut: Tiling | None = None,
    ) -> Tensor:
        """x [rows, in] → [rows, out]: with `gated` silu(first half) · second half; plus `residual`; in `dtype`.

        With `gelu` too it is gelu(first half) · second half; with `gates` [rows, out] it is gelu(product) · gates.
        With `cap` the result becomes cap · tanh(result / cap).
        """
        assert residual is None or gates is None
        beside = residual if gates is None else gates
        (outputs, inputs), rows = matrix.shape, len(x)
        cut = cut or tiling(outputs, inputs, gated, row_tile(rows))
        if gated:
            outputs //= 2
        out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
        grid = (-(-outputs // cut.outputs), cut.splits, -(-rows // cut.rows))
        partial = out
        if cut.splits > 1:
            assert grid[0] * grid[2] <= len(self.counters)
            partial = torch.empty((1 + gated) * cut.splits * rows * outputs, dtype=torch.float32, device=x.device)
        _product[grid](
            tiles(x, cut.rows, cut.inputs),
            tiles(matrix.weight, cut.outputs, cut.inputs),
            matrix.bias,
            beside,
            out,
            partial,
            self.counters,
            rows,
            0 if beside is None else beside.stride(0),
            outputs,
            cut.rows,
            cut.outputs,
            cut.inputs,
            split_inputs(inputs, cut.splits),
            cut.splits,
            gated,
            gelu,
            matrix.bias is not None,
            beside is not None,
            gates is not None,
            cap,
            "ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=cut.warps,
            num_stages=cut.stages,
            launch_pdl=overlaps(x.device),
        )
        return out


def split_inputs(inputs: int, splits: int) -> int:
    """Inputs of a split, a multiple of every step, so that splits do not depend on the step."""
    return -(-inputs // (128 * splits)) * 128


def tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x as tiles that are copied in bulk; its rows are moved to where that is possible if they must be."""
    whole = COPIED // x.element_size()
    if x.stride(1) != 1 or x.stride(0) % whole or x.data_ptr() % COPIED:
        width = -(-x.shape[1] // whole) * whole
        moved = torch.empty(len(x), width, dtype=x.dtype, device=x.device)[:, : x.shape[1]]
        x = moved.copy_(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
