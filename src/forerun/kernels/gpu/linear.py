"""Products that keep bits on a GPU: fixed tiles and a fixed split over the inputs, whatever the number of rows.

An output element is one sum: tiles of the inputs in order within a split, then the splits in order. That order depends
on the matrix alone. More rows mean more tiles of rows; a tile never looks at another. There are two ways to the same
sums, and the number of rows decides between them:

- Few rows: a program for each split. Whichever finishes last adds the splits of an element, so a product is one launch.
- Many rows: a program takes all splits in turn, of a wider tile, and holds what it has added up in registers.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from forerun.kernels.gpu.gelu import gelu_exponent
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import let_next_in, overlaps, wait_for_previous
from forerun.kernels.matrix import FloatMatrix

MULTIPROCESSORS = 132  # tilings are chosen for a large GPU; a smaller one runs the same programs in more waves
NARROW = 10_000_000  # weights: programs of a smaller matrix take fewer outputs, and shorter splits where they must
ROWS = 16  # the smallest tile a tensor core takes
COPIED = 16  # bytes: rows of a tile that are copied in bulk start at multiples of it

# Tiles of many rows: how many weight rows a program takes, and its stages. The wider one needs all registers for one
# sum. STEP inputs at a time; BAND tiles of rows take their turns at the same weights while those are in the cache.
WIDE = ((256, 3), (128, 4))
WIDE_ROWS, WIDE_STEP, WIDE_WARPS, BAND = 128, 64, 8, 8
WIDE_BYTES = 200 << 10  # of shared memory that a program must be able to have for those stages
# What a choice of tiles takes on an H200, in microseconds, to compare one with another.
WIDE_COST = 0.38 / 128  # for a step of WIDE_ROWS rows, per row of weights
FEW_COST = (0.1, 0.48 / 64)  # for such a step of two programs on one multiprocessor, and per row of weights
PROGRAM_COST = 2.5  # for the first loads and the last stores of a program
BYTES_PER_MICROSECOND = 4e6  # of sums that programs leave for the last one


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up. The splits decide the bits: they are a function of the matrix alone."""

    rows: int  # per program
    outputs: int  # per program
    inputs: int  # per step
    splits: int
    warps: int
    stages: int
    in_turn: bool = False  # a program takes all splits, one after another


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


@cache
def tiling_for(outputs: int, inputs: int, gated: bool, rows: int, wide: bool) -> Tiling:
    """The fastest tiling for so many rows, as far as a few constants tell; all of them give the same bits.

    `wide` is whether the device has the memory for wide tiles and the format is one they are for.
    """
    few = tiling(outputs, inputs, gated, row_tile(rows))
    if rows <= WIDE_ROWS // 2 or not wide:
        return few
    choices = [few, *wide_tilings(gated, few.splits)]
    return min(choices, key=lambda cut: microseconds(cut, outputs, inputs, gated, rows))


def wide_tilings(gated: bool, splits: int) -> list[Tiling]:
    """Tilings for many rows. With several splits a program has two sums for every output, so that tiles are smaller."""
    return [
        Tiling(WIDE_ROWS, width // (1 + gated), WIDE_STEP, splits, WIDE_WARPS, stages, in_turn=True)
        for width, stages in WIDE
        if splits == 1 or width == 128
    ]


def microseconds(cut: Tiling, outputs: int, inputs: int, gated: bool, rows: int) -> float:
    """About how long a product of many rows takes with this tiling: waves of programs, and sums that are left aside."""
    width, outputs = cut.outputs * (1 + gated), outputs // (1 + gated)
    programs = -(-outputs // cut.outputs) * -(-rows // cut.rows)
    if cut.in_turn:
        steps = -(-inputs // cut.inputs)
        return -(-programs // MULTIPROCESSORS) * (steps * WIDE_COST * width + PROGRAM_COST)
    steps = split_inputs(inputs, cut.splits) // cut.inputs
    waves = -(-programs * cut.splits // (2 * MULTIPROCESSORS))
    left = 2 * 4 * (1 + gated) * cut.splits * rows * outputs if cut.splits > 1 else 0  # written and read
    fixed, each = FEW_COST
    return waves * (steps * (fixed + each * width) + PROGRAM_COST) + left / BYTES_PER_MICROSECOND


@cache
def has_room(device: torch.device) -> bool:
    """Has a program enough shared memory for the stages of a wide tile?"""
    if device.type != "cuda":
        return True
    index = torch.cuda.current_device() if device.index is None else device.index
    return driver.active.utils.get_device_properties(index)["max_shared_mem"] >= WIDE_BYTES


def row_tile(rows: int) -> int:
    """Rows per program. Tensor cores add up an output's inputs in one order whatever the tile; the tests measure it."""
    return next((tile for tile in (16, 32, 64) if rows <= tile), 128)


@triton.jit(do_not_specialize=["rows", "residual_stride"])
def _few_rows(
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
    _finish(
        total, gate_total, row, column, mask, inside, bias, residual, out, residual_stride, x.dtype,
        OUTPUTS, GATED, GELU, BIAS, RESIDUAL, GATES, CAP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _many_rows(
    x,  # as in `_few_rows`
    weight,
    bias,
    residual,
    out,
    rows,
    residual_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BAND: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATES: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same sums as `_few_rows`: a split's sum starts at zero and is added to those before it where the split ends.

    Programs go down a band of row tiles before they go on to the next weights.
    """
    blocks: tl.constexpr = (OUTPUTS + OUT_TILE - 1) // OUT_TILE
    program = tl.program_id(0)
    top = program // (BAND * blocks) * BAND
    height = tl.minimum(tl.cdiv(rows, ROW_TILE) - top, BAND)
    place = program % (BAND * blocks)
    tile, block = top + place % height, place // height
    wait_for_previous()
    total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    gate_total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    if SPLITS > 1:  # the splits before the present one
        before = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
        gate_before = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    for start in range(0, INPUTS, IN_TILE):
        values = x.load([tile * ROW_TILE, start])  # zeros beyond the edges
        if GATED:
            gates = weight.load([block * OUT_TILE, start])
            gate_total = tl.dot(values, gates.T, gate_total, input_precision=PRECISION)
            weights = weight.load([OUTPUTS + block * OUT_TILE, start])
        else:
            weights = weight.load([block * OUT_TILE, start])
        total = tl.dot(values, weights.T, total, input_precision=PRECISION)
        if SPLITS > 1 and (start + IN_TILE) % SPLIT_INPUTS == 0:
            before += total
            total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
            if GATED:
                gate_before += gate_total
                gate_total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    let_next_in()
    if SPLITS > 1:
        if (INPUTS + IN_TILE - 1) // IN_TILE * IN_TILE % SPLIT_INPUTS != 0:  # the last split is shorter
            before += total
            if GATED:
                gate_before += gate_total
        total, gate_total = before, gate_before
    row = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    column = block * OUT_TILE + tl.arange(0, OUT_TILE)
    inside = column < OUTPUTS
    mask = (row < rows)[:, None] & inside[None, :]
    _finish(
        total, gate_total, row, column, mask, inside, bias, residual, out, residual_stride, x.dtype,
        OUTPUTS, GATED, GELU, BIAS, RESIDUAL, GATES, CAP,
    )  # fmt: skip


@triton.jit
def _finish(
    total,  # [rows, outputs] of a tile, summed over all inputs
    gate_total,  # of a gated matrix, whose second half `total` is then
    row,
    column,
    mask,
    inside,
    bias,
    residual,
    out,
    residual_stride,
    kind: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATES: tl.constexpr,
    CAP: tl.constexpr,
):
    """All that comes after the sums, element by element, and the store of the result."""
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


class ProductLauncher:
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
        cut = cut or tiling_for(outputs, inputs, gated, rows, x.element_size() == 2 and has_room(x.device))
        if gated:
            outputs //= 2
        out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
        blocks, row_tiles = -(-outputs // cut.outputs), -(-rows // cut.rows)
        operands = (
            tiles(x, cut.rows, cut.inputs),
            tiles(matrix.weight, cut.outputs, cut.inputs),
            matrix.bias,
            beside,
            out,
        )
        stride = 0 if beside is None else beside.stride(0)
        sizes = cut.rows, cut.outputs, cut.inputs, split_inputs(inputs, cut.splits), cut.splits
        finish = gated, gelu, matrix.bias is not None, beside is not None, gates is not None, cap
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        how = {"num_warps": cut.warps, "num_stages": cut.stages, "launch_pdl": overlaps(x.device)}
        if cut.in_turn:
            _many_rows[(blocks * row_tiles,)](
                *operands, rows, stride, outputs, inputs, *sizes, BAND, *finish, precision, **how
            )
            return out
        partial = out
        if cut.splits > 1:
            assert blocks * row_tiles <= len(self.counters)
            partial = torch.empty((1 + gated) * cut.splits * rows * outputs, dtype=torch.float32, device=x.device)
        _few_rows[(blocks, cut.splits, row_tiles)](
            *operands, partial, self.counters, rows, stride, outputs, *sizes, *finish, precision, **how
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
