"""Attention of a decode pass over pages, in one launch.

A sequence's rows · query heads of one key head are the rows of tiles of 16. Keys are split: split s takes the blocks s,
s + SPLITS, s + 2 · SPLITS, … in key order, with a running maximum, and leaves its result in scratch; the last program
of a tile to finish merges the splits in ascending order. Neither the blocks nor the splits nor the order depend on
anything but the model's shape; a block that a row does not see changes no bit of it, so blocks may be skipped.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import AttentionSpec, LayerPages, PassRows

TILE = 16  # rows of a product: the least that tensor cores take
LONGEST_BLOCK = 64  # keys
BLOCK_AREA = 8192  # keys · padded head size of a block, at most: the blocks of large heads are shorter
MERGED = 1024  # splits · padded head size that are read at once in a merge: what fits into registers
FEW = 2  # splits that are read at once where no more are left: short contexts have few
PROGRAMS = 128  # for each tile, about as many as a GPU has multiprocessors
LOG2_E = math.log2(math.e)


@triton.jit
def _read_block(
    query,  # [TILE, PADDED]
    at,  # [TILE] the rows' positions, -1 for rows that are not
    block,
    newest,  # position of the tile's last row
    keys,  # of the block's page and key head, as values
    values,
    peak,
    total,
    acc,
    scale,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Peak [TILE], total [TILE] and weighted values [TILE, PADDED] after one more block of keys."""
    column = tl.arange(0, query.shape[1])
    key = block * BLOCK + tl.arange(0, BLOCK)
    slot = key % PAGE
    inside = column < SIZE
    # What lies in slots past the rows is masked as a score, but a value of weight 0 must not be NaN.
    key_block = tl.load(keys + column[:, None] * PAGE + slot[None, :], mask=inside[:, None], other=0.0)
    written = (key <= newest)[:, None] & inside[None, :]
    value_block = tl.load(values + slot[:, None] * SIZE + column[None, :], mask=written, other=0.0)
    score = tl.dot(query, key_block, input_precision="ieee") * scale  # [TILE, BLOCK], base 2
    if SOFTCAP > 0:
        score = SOFTCAP * (1.0 - 2.0 / (tl.exp2(score * (2.8853900817779268 / SOFTCAP)) + 1.0))  # tanh, 2 · log2(e)
    seen = key[None, :] <= at[:, None]
    if WINDOW > 0:
        seen = seen & (key[None, :] > at[:, None] - WINDOW)
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    fade = tl.exp2(peak - level)
    weight = tl.exp2(score - level[:, None])
    total = total * fade + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(value_block.dtype), value_block, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _add_splits(
    acc,  # [TILE, PADDED]
    start,  # the first of COUNT splits
    row,
    real,
    first,
    last,
    partial,
    peaks,
    level,  # [TILE], as whole
    whole,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The weighted results of splits are added in ascending order; those without keys add exactly nothing."""
    column = tl.arange(0, acc.shape[1])
    for offset in tl.static_range(COUNT):
        one = start + offset
        mine = real & (last - (last + SPLITS - one) % SPLITS >= first)
        part_peak = tl.load(peaks + one * TILE + row, mask=mine, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + (one * TILE + row)[:, None] * acc.shape[1] + column[None, :],
            mask=mine[:, None] & (column < SIZE)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += (tl.exp2(part_peak - level) / whole)[:, None] * part
    return acc


@triton.jit
def _merge(
    row,  # [TILE]
    real,  # [TILE] rows that are
    first,  # block that the tile sees, as last
    last,
    partial,  # of the tile, as peaks and sums
    peaks,
    sums,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
):
    """The attention of a tile [TILE, PADDED]: splits in ascending order, MANY at once and the rest FEW at once."""
    split = tl.arange(0, SPLITS)
    used = real[:, None] & (last - (last + SPLITS - split) % SPLITS >= first)[None, :]  # is its last block seen?
    place = split[None, :] * TILE + row[:, None]
    peak = tl.load(peaks + place, mask=used, other=float("-inf"), cache_modifier=".cg")  # [TILE, SPLITS]
    total = tl.load(sums + place, mask=used, other=0.0, cache_modifier=".cg")
    level = tl.where(real, tl.max(peak, axis=1), 0.0)
    whole = tl.where(real, tl.sum(tl.exp2(peak - level[:, None]) * total, axis=1), 1.0)
    acc = tl.zeros((TILE, PADDED), tl.float32)
    count = tl.minimum(last + 1, SPLITS)  # where there are fewer blocks than splits, those past the last have none
    bulk = count // MANY * MANY
    for start in range(0, bulk, MANY):
        acc = _add_splits(
            acc, start, row, real, first, last, partial, peaks, level, whole, SIZE, SPLITS, TILE, MANY
        )  # fmt: skip
    for start in range(bulk, count, FEW):
        acc = _add_splits(
            acc, start, row, real, first, last, partial, peaks, level, whole, SIZE, SPLITS, TILE, FEW
        )  # fmt: skip
    return acc


@triton.jit(
    do_not_specialize=["width", "table_stride", "table_columns"],
    do_not_specialize_on_alignment=["position", "table", "counters"],
)
def _attend(
    qkv,
    keys,
    values,
    position,
    table,
    out,
    partial,  # [sequences, tiles · kv heads, SPLITS, TILE, PADDED] float32
    peaks,  # [sequences, tiles · kv heads, SPLITS, TILE] float32, as sums
    sums,
    counters,
    width,
    table_stride,
    table_columns,
    qkv_stride,
    key_stride,
    value_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    """One split of one tile."""
    split = tl.program_id(0)
    lane = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = lane % KV_HEADS
    first_row = lane // KV_HEADS * TILE  # of the sequence's width · GROUP
    begin = tl.load(position + sequence)
    rows = tl.minimum(width * GROUP - first_row, TILE)
    newest = begin + (first_row + rows - 1) // GROUP
    last = newest // BLOCK
    first = 0
    if WINDOW > 0:
        first = tl.maximum(begin + first_row // GROUP - (WINDOW - 1), 0) // BLOCK
    start = first + (split + SPLITS - first % SPLITS) % SPLITS
    # Without a window this load does not wait for `begin`. Both are older than the kernel before, which may still run.
    pages = table + sequence.to(tl.int64) * table_stride
    page = tl.load(pages + tl.minimum(start * BLOCK // PAGE, table_columns - 1)).to(tl.int64)
    after_previous()

    if start > last:
        return  # this split has no block: nobody waits for it
    splits = tl.minimum(last - first + 1, SPLITS)  # that have one
    own = sequence * tl.num_programs(1) + lane
    tile_sums = own.to(tl.int64) * (SPLITS * TILE)
    tile_partial = tile_sums * PADDED
    column = tl.arange(0, PADDED)
    row = tl.arange(0, TILE)
    real = row < rows
    known = real[:, None] & (column < SIZE)[None, :]
    at = tl.where(real, begin + (first_row + row) // GROUP, -1)
    pass_row = sequence.to(tl.int64) * width + (first_row + row) // GROUP
    head = kv_head * GROUP + (first_row + row) % GROUP
    place = pass_row * qkv_stride + head * SIZE
    query = tl.load(qkv + place[:, None] + column[None, :], mask=known, other=0.0)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, PADDED], tl.float32)
    for block in range(start, last + 1, SPLITS):
        page_keys = keys + page * key_stride + kv_head * (SIZE * PAGE)
        page_values = values + page * value_stride + kv_head * (SIZE * PAGE)
        peak, total, acc = _read_block(
            query, at, block, newest, page_keys, page_values, peak, total, acc, scale,
            SIZE, PAGE, BLOCK, WINDOW, SOFTCAP,
        )  # fmt: skip
        page = tl.load(pages + tl.minimum(block + SPLITS, last) * BLOCK // PAGE).to(tl.int64)
    part = tile_sums + split * TILE + row
    tl.store(peaks + part, peak, mask=real)
    tl.store(sums + part, total, mask=real)
    tl.store(partial + part[:, None] * PADDED + column[None, :], acc, mask=known)
    tl.debug_barrier()  # all threads have stored before one of them says so

    if tl.atomic_add(counters + own, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(counters + own, 0)
        result = _merge(
            row, real, first, last, partial + tile_partial, peaks + tile_sums, sums + tile_sums,
            SIZE, PADDED, SPLITS, TILE, MANY, FEW,
        )  # fmt: skip
        out_row = sequence.to(tl.int64) * width + (first_row + row) // GROUP
        out_head = kv_head * GROUP + (first_row + row) % GROUP
        target = (out_row * (KV_HEADS * GROUP) + out_head) * SIZE
        shown = real[:, None] & (column < SIZE)[None, :]
        tl.store(out + target[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=shown)


def splits(kv_heads: int) -> int:
    """Splits of the keys, a power of 2: enough programs for a GPU when there is one sequence."""
    wanted = max(8, min(32, PROGRAMS // kv_heads))
    return 1 << (wanted.bit_length() - 1)


@on_its_device
def attention(qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages, counters: Tensor) -> Tensor:
    """[rows, layout.width or more] → [rows, heads · size]; the rows' own keys and values are in the pages already.

    Counters are zero before and after.
    """
    layout, sequences, (kv_heads, page) = spec.layout, len(rows.position), layer.values.shape[1:3]
    group, table = layout.heads // kv_heads, rows.table(layer)
    padded = max(16, triton.next_power_of_2(layout.size))
    block = min(page, LONGEST_BLOCK, BLOCK_AREA // padded)
    lanes = kv_heads * triton.cdiv(rows.width * group, TILE)
    parts = splits(kv_heads)
    many = max(1, min(8, parts, MERGED // padded))
    assert page >= 16 and page % block == 0 and counters.numel() >= sequences * lanes
    assert qkv.stride(1) == 1 and layer.keys[0].is_contiguous() and layer.values[0].is_contiguous()
    out = torch.empty(len(qkv), layout.heads * layout.size, dtype=qkv.dtype, device=qkv.device)
    partial = torch.empty(sequences, lanes, parts, TILE, padded, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(2, sequences, lanes, parts, TILE, dtype=torch.float32, device=qkv.device)
    _attend[(parts, lanes, sequences)](
        qkv,
        layer.keys,
        layer.values,
        rows.position,
        table,
        out,
        partial,
        sums[0],
        sums[1],
        counters,
        rows.width,
        table.stride(0),
        table.shape[1],
        qkv.stride(0),
        layer.keys.stride(0),
        layer.values.stride(0),
        spec.factor * LOG2_E,
        kv_heads,
        group,
        layout.size,
        padded,
        page,
        block,
        parts,
        TILE,
        many,
        min(FEW, many),
        spec.window,
        spec.softcap * LOG2_E,
        num_warps=8 if padded > 128 else 4,
        num_stages=3,
        launch_pdl=overlaps(qkv.device),
    )
    return out
