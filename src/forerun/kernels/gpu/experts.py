"""A mixture of experts: which ones a row goes to, and their gated networks.

Rows that go to the same expert are multiplied together, in tiles, so that its weights are read once for a tile. An
output is one sum over the inputs in order and a row's experts are added in order, so a row's bits are its own: neither
the tile nor the rows beside it change them. Experts that no row goes to are not read: with few rows, reading is what
takes the time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.gelu import gelu_exponent
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.linear import ROWS, has_room, tiles
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import Activation


class Cut(NamedTuple):
    """What a program takes of a product."""

    outputs: int
    inputs: int  # per step, of a format of two bytes
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """As the kernels take them."""
        return {
            "OUT_TILE": self.outputs,
            "IN_TILE": self.inputs,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Rows of a tile, and how many rows an expert may have on average for it to be the best one: more are for larger tiles.
TILES = ((16, 10.0), (32, 24.0), (64, 96.0), (128, float("inf")))
# What a program takes, by the rows of its tile; 1 is a pass of one row, whose experts have a tile of 16 each.
ENTERING = {
    1: Cut(16, 128, 4, 5),
    16: Cut(32, 128, 4, 4),
    32: Cut(32, 128, 4, 4),
    64: Cut(64, 64, 4, 4),
    128: Cut(128, 64, 8, 3),
}
LEAVING = {
    1: Cut(32, 128, 4, 5),
    16: Cut(32, 128, 4, 5),
    32: Cut(64, 128, 4, 4),
    64: Cut(128, 64, 4, 4),
    128: Cut(128, 64, 8, 4),
}
PAIRS = (512, 4096)  # of a row and one of its experts that a program looks through at a time: of few, and of many
COLUMNS = 256  # of a row, whose experts' answers a program adds up


def aligned(x: Tensor) -> Tensor:
    """Rows one after another from an address that any load may start at: Triton compiles other code for others."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@on_its_device
def route(logits: Tensor, top: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `top` largest of each row in ascending order of their ids, and their softmax, times the experts' `scale`.

    Ties go to the lower id: ids [rows, top] int64, weights float32.
    """
    rows, experts = logits.shape
    assert top <= experts and logits.stride(1) == 1
    ids = torch.empty(rows, top, dtype=torch.long, device=logits.device)
    weights = torch.empty(rows, top, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(rows,)](
        logits,
        scale,
        ids,
        weights,
        logits.stride(0),
        EXPERTS=experts,
        TOP=top,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4,
        launch_pdl=overlaps(logits.device),
    )
    return ids, weights


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def _route(logits, scale, ids, weights, stride, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    inside = number < EXPERTS
    score = tl.load(logits + row * stride + number, mask=inside, other=float("-inf")).to(tl.float32)
    # Scores as integers of the same order, behind them their numbers from the last to the first: one maximum finds the
    # best and, among equals, the first. Zeros have one sign; what is not a number is above or below all others.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - number).to(tl.int64)
    chosen = number < 0
    for _ in range(TOP):
        best = tl.max(tl.where(inside & (chosen == 0), rank, -0x7FFFFFFFFFFFFFFF - 1), axis=0)
        chosen = chosen | (inside & (rank == best))
    weight = tl.where(chosen, tl.exp(score - tl.max(tl.where(chosen, score, float("-inf")), axis=0)), 0.0)
    place = row * TOP + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(ids + place, number.to(tl.int64), mask=chosen)
    share = weight / tl.sum(weight, axis=0)
    if scale is not None:
        share = share * tl.load(scale + number, mask=inside, other=0.0)
    tl.store(weights + place, share, mask=chosen)


def row_tile(rows: int, top: int, experts: int, x: Tensor) -> int:
    """Rows of a tile, for x in its format and on its device. All of them give the same bits."""
    if rows <= 1:
        return 1
    largest = ROWS if x.element_size() > 2 else 128 if has_room(x.device) else 64
    return next(size for size, mean in TILES if size == largest or rows * top <= mean * experts)


@on_its_device
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = "silu"
) -> Tensor:
    """Σ weight · expert(row) over the experts of each row, whose ids come in ascending order: [rows, hidden].

    gate_up [experts, 2 · inner, hidden], gate first; down [experts, hidden, inner]. The ids of a row differ.
    """
    x, ids, weights = aligned(x), aligned(ids), aligned(weights)
    (rows, top), (count, hidden, inner) = ids.shape, down.shape
    assert gate_up.is_contiguous() and down.is_contiguous() and gate_up.shape[1:] == (2 * inner, hidden)
    pairs, alone = rows * top, rows <= 1
    between, parts = x.new_empty(pairs, inner), x.new_empty(pairs, hidden)
    out, early = torch.empty_like(x), overlaps(x.device)
    tile = row_tile(rows, top, count, x)
    size, most = max(ROWS, tile), min(count, pairs)
    most += (pairs - most) // size  # tiles, however rows are spread over experts
    owned = sizes = ids  # a row alone has its list already
    if not alone:
        owned = torch.empty(count, rows, dtype=torch.int32, device=x.device)
        sizes = torch.empty(count, dtype=torch.int32, device=x.device)
        looked_at = PAIRS[pairs > PAIRS[0]]
        _gather[(count,)](ids, owned, sizes, rows, TOP=top, BLOCK=looked_at, num_warps=8, launch_pdl=early)
    whole = x.element_size() // 2  # of a format twice as wide a step has half the inputs
    enter, leave = (cut._replace(inputs=cut.inputs // whole) for cut in (ENTERING[tile], LEAVING[tile]))
    lists = ids, owned, sizes
    shape = {"HIDDEN": hidden, "INNER": inner, "EXPERTS": count, "ONE_ROW": alone, "ROW_TILE": size}
    how = {"PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "launch_pdl": early, **shape}
    _enter[(triton.cdiv(inner, enter.outputs), most)](
        x, *lists, tiles(gate_up.flatten(0, 1), enter.outputs, enter.inputs), between, rows,
        TOP=top, GELU=activation == "gelu_tanh", **enter.options(), **how,
    )  # fmt: skip
    _leave[(triton.cdiv(hidden, leave.outputs), most)](
        between, *lists, tiles(down.flatten(0, 1), leave.outputs, leave.inputs), parts, rows, **leave.options(), **how
    )
    _add_up[(rows, triton.cdiv(hidden, COLUMNS))](
        parts, weights, out, HIDDEN=hidden, TOP=top, COLUMNS=COLUMNS, num_warps=4, launch_pdl=early
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _gather(ids, owned, sizes, rows, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The pairs (row · TOP + turn) of an expert in order, owned [experts, rows], and how many there are."""
    after_previous()
    expert = tl.program_id(0)
    found = 0
    for start in range(0, rows * TOP, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + pair, mask=pair < rows * TOP, other=-1) == expert).to(tl.int32)
        place = found + tl.cumsum(mine, axis=0) - 1
        tl.store(owned + expert.to(tl.int64) * rows + place, pair, mask=mine > 0)
        found += tl.sum(mine, axis=0)
    tl.store(sizes + expert, found)


@triton.jit
def _tile_of(ids, owned, sizes, rows, EXPERTS: tl.constexpr, ONE_ROW: tl.constexpr, ROW_TILE: tl.constexpr):
    """The expert of this program's tile, or a number past the last one; the pairs in the tile and which are there.

    Tiles are numbered through all experts, as many for each as its pairs need.
    """
    tile = tl.program_id(1)
    slot = tl.arange(0, ROW_TILE)
    if ONE_ROW:
        expert = tl.load(ids + tile).to(tl.int32)
        pair = tile + 0 * slot
        there = slot == 0
    else:
        number = tl.arange(0, triton.next_power_of_2(EXPERTS))
        size = tl.load(sizes + number, mask=number < EXPERTS, other=0)
        end = tl.cumsum(tl.cdiv(size, ROW_TILE), axis=0)
        expert = tl.sum((end <= tile).to(tl.int32), axis=0)
        slot += (tile - tl.max(tl.where(end <= tile, end, 0), axis=0)) * ROW_TILE
        there = slot < tl.sum(tl.where(number == expert, size, 0), axis=0)
        pair = tl.load(owned + expert.to(tl.int64) * rows + slot, mask=there, other=0)
    return expert, pair.to(tl.int64), there


@triton.jit(do_not_specialize=["rows"])
def _enter(
    x,  # [rows, HIDDEN]
    ids,
    owned,
    sizes,
    gate_up,  # [EXPERTS · 2 · INNER, HIDDEN], as a descriptor of its tiles
    between,  # [rows · TOP, INNER]
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """silu(gate) · up, or gelu(gate) · up, of some inner columns of a tile of rows that go to the same expert."""
    after_previous()
    expert, pair, there = _tile_of(ids, owned, sizes, rows, EXPERTS, ONE_ROW, ROW_TILE)
    if expert >= EXPERTS:
        return
    first = tl.program_id(0) * OUT_TILE
    source = tl.arange(0, IN_TILE)
    here = x + (pair // TOP * HIDDEN)[:, None] + source[None, :]
    gate = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    up = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    for start in range(0, HIDDEN, IN_TILE):
        inside = there[:, None] & (start + source < HIDDEN)[None, :]
        values = tl.load(here + start, mask=inside, other=0.0)
        gates = gate_up.load([expert * (2 * INNER) + first, start])
        gate = tl.dot(values, gates.T, gate, input_precision=PRECISION)
        ups = gate_up.load([expert * (2 * INNER) + INNER + first, start])
        up = tl.dot(values, ups.T, up, input_precision=PRECISION)
    column = first + tl.arange(0, OUT_TILE)
    kind = between.dtype.element_ty
    opened = gate.to(kind).to(tl.float32)  # rounded as a product of its own
    steep = gelu_exponent(opened) if GELU else opened
    answer = opened / (1.0 + tl.exp(-steep)) * up.to(kind).to(tl.float32)
    mask = there[:, None] & (column < INNER)[None, :]
    tl.store(between + (pair * INNER)[:, None] + column[None, :], answer.to(kind), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _leave(
    between,  # [rows · TOP, INNER]
    ids,
    owned,
    sizes,
    down,  # [EXPERTS · HIDDEN, INNER], as a descriptor of its tiles
    parts,  # [rows · TOP, HIDDEN]
    rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    ROW_TILE: tl.constexpr,
    OUT_TILE: tl.constexpr,
    IN_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of the answers of an expert to a tile of its rows."""
    after_previous()
    expert, pair, there = _tile_of(ids, owned, sizes, rows, EXPERTS, ONE_ROW, ROW_TILE)
    if expert >= EXPERTS:
        return
    first = tl.program_id(0) * OUT_TILE
    source = tl.arange(0, IN_TILE)
    here = between + (pair * INNER)[:, None] + source[None, :]
    total = tl.zeros((ROW_TILE, OUT_TILE), tl.float32)
    for start in range(0, INNER, IN_TILE):
        inside = there[:, None] & (start + source < INNER)[None, :]
        values = tl.load(here + start, mask=inside, other=0.0)
        weight = down.load([expert * HIDDEN + first, start])
        total = tl.dot(values, weight.T, total, input_precision=PRECISION)
    column = first + tl.arange(0, OUT_TILE)
    mask = there[:, None] & (column < HIDDEN)[None, :]
    tl.store(parts + (pair * HIDDEN)[:, None] + column[None, :], total.to(parts.dtype.element_ty), mask=mask)


@triton.jit
def _add_up(parts, weights, out, HIDDEN: tl.constexpr, TOP: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one row: its experts' answers, weighted and added in the order of their ids."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for turn in tl.static_range(TOP):
        pair = row * TOP + turn
        said = tl.load(parts + pair * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        total += said * tl.load(weights + pair)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)
