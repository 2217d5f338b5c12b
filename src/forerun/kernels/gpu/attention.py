"""Attention over pages for all rows of a pass. A row has the same bits in both forms, beside whatever other rows.

A row of a tile is a row of the pass with one of the query heads that share a key head. Keys are cut in groups whose
borders depend on positions alone. Inside a group blocks of keys follow each other with a running maximum; groups are
merged in key order by one formula, `_add_group`. What few rows see is read by many programs, a group each, whose
results wait in scratch for the last of them, which merges; where a pass has many rows of prompts, a tile of them is one
program that keeps two results in registers, that of its group and that of all groups before. Both add blocks with
`_add_block`.

What makes the forms agree to the bit:
- Blocks of keys are the same size in both, so a product adds in the same order; only the number of its rows differs.
- The weights of a block are summed by a product with ones. A sum of Triton's own follows the layout of the registers,
  which is another one for tiles of another height. A maximum has the same bits in any order.
- No multiplication is joined with an addition but where `fma` says so: the compiler would join what it likes.
- A block or a group that a row does not see changes no bit of it, so a tile may read what only some of its rows see.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import CHUNK_ROWS, WIDEST, AttentionSpec, LayerPages, PassRows

# Borders of groups. Later groups are longer: that bounds the scratch and what the last program of a tile has to merge.
NEAR_KEYS = 256  # of a group that ends at FAR or before
FAR = 8192  # a multiple of both lengths
FAR_KEYS = 1024  # of a group behind FAR

LONGEST_BLOCK = 64  # keys
BLOCK_BYTES = 16 * 1024  # of a block's keys, at most: the blocks of large heads are shorter
ONES = 16  # columns of the product that sums weights: the fewest that tensor cores take

TILE = 16  # rows of a tile of generated rows: the fewest that tensor cores take
PROGRAMS = 1024  # of the launch for generated rows, about: a few for each multiprocessor of a large GPU
MOST_SPLITS = 64  # programs for one tile
LEAST_SPLITS = 4  # where there are many tiles: one of them may have a long context
MERGED = 1024  # groups · padded head size that are read at once in a merge: what fits into registers
WARPS = 4  # of a program for generated rows; twice as many for heads over 128
STAGES = 7  # of the loop over blocks: half of them for page numbers, half for keys and values on their way

PROMPT_TILE = 128  # rows of a tile of a prompt's rows, at most
PROMPT_BYTES = 32 * 1024  # of such a tile's queries, at most: two results of that shape fit into registers
PROMPT_WARPS = 8
PROMPT_STAGES = 5
SPLIT_ROWS = 512  # of a pass, up to which a tile of a prompt's rows has a program for each of some groups as well
SPLIT_BYTES = 512 << 20  # of scratch for that, at most

ROOMY = 160 * 1024  # bytes of shared memory for one program; GPUs with less get fewer stages and smaller tiles
LOG2_E = math.log2(math.e)


@triton.jit
def _group_of(key, NEAR_KEYS: tl.constexpr, FAR: tl.constexpr, FAR_KEYS: tl.constexpr):
    return tl.minimum(key, FAR) // NEAR_KEYS + tl.maximum(key - FAR, 0) // FAR_KEYS


@triton.jit
def _start_of(group, NEAR_KEYS: tl.constexpr, FAR: tl.constexpr, FAR_KEYS: tl.constexpr):
    """The first key of a group."""
    near: tl.constexpr = FAR // NEAR_KEYS
    return tl.minimum(group, near) * NEAR_KEYS + tl.maximum(group - near, 0) * FAR_KEYS


@triton.jit
def _add_block(
    query,  # [TILE, PADDED]
    ones,  # [BLOCK, ONES]
    at,  # [TILE] the rows' positions, -1 for rows that are not
    low,  # [TILE] first and last position of the rows' pictures; None without any
    high,
    block,
    oldest,  # position of the tile's first row, and of its last one
    newest,
    lowest,  # the first key that any row of the tile sees, and the last one
    highest,
    earliest,  # the first key that a row may see; None: all may
    keys,  # of the block's page and key head, as values
    values,
    peak,  # [TILE]
    total,  # [TILE, ONES] all columns alike
    acc,  # [TILE, PADDED]
    scale,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Peak, sum of weights and weighted values of a group after one more block of its keys."""
    column = tl.arange(0, query.shape[1])
    start = block * BLOCK
    key = start + tl.arange(0, BLOCK)
    slot = tl.multiple_of(start % PAGE, BLOCK) + tl.arange(0, BLOCK)
    # What lies in slots past the rows is masked as a score, but a value of weight 0 must not be NaN.
    written = key <= highest
    if earliest is not None:
        written = written & (key >= lowest)
    if query.shape[1] == SIZE:
        key_block = tl.load(keys + column[:, None] * PAGE + slot[None, :])
        value_block = tl.load(values + slot[:, None] * SIZE + column[None, :], mask=written[:, None], other=0.0)
    else:
        inside = column < SIZE
        key_block = tl.load(keys + column[:, None] * PAGE + slot[None, :], mask=inside[:, None], other=0.0)
        known = written[:, None] & inside[None, :]
        value_block = tl.load(values + slot[:, None] * SIZE + column[None, :], mask=known, other=0.0)
    score = tl.dot(query, key_block, input_precision="ieee")  # [TILE, BLOCK]
    if SOFTCAP > 0:
        score = SOFTCAP * (1.0 - 2.0 / (tl.exp2(score * (scale * (2.8853900817779268 / SOFTCAP))) + 1.0))  # tanh
    whole = start + (BLOCK - 1) <= oldest  # do all rows see the whole block?
    if WINDOW > 0:
        whole = whole & (start > newest - WINDOW)
    if earliest is not None:
        whole = whole & (start >= earliest)
    if not whole:
        seen = key[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > at[:, None] - WINDOW)
        if low is not None:
            seen = seen | ((key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None]))
        if earliest is not None:
            seen = seen & (key >= earliest)[None, :]
        score = tl.where(seen, score, float("-inf"))
    best = tl.max(score, axis=1)
    if SOFTCAP == 0:
        best = best * scale  # to base 2
    higher = tl.maximum(peak, best)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    fade = tl.exp2(peak - level)  # exactly 1 where no score is higher than those before
    if SOFTCAP > 0:
        weight = tl.exp2(score - level[:, None])
    else:
        minus = tl.broadcast_to(-level[:, None], score.shape)
        weight = tl.exp2(tl.fma(score, tl.full(score.shape, scale, tl.float32), minus))
    weight = weight.to(value_block.dtype)
    total = tl.dot(weight, ones, total * fade[:, None], input_precision="ieee")
    acc = tl.dot(weight, value_block, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _add_group(
    whole_peak,  # [TILE], as peak
    whole_total,  # [TILE, any number of columns], as total
    whole,  # [TILE, PADDED], as acc
    peak,
    total,
    acc,
):
    """What a row has of all groups so far after one more. A group that the row does not see changes nothing."""
    higher = tl.maximum(whole_peak, peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(whole_peak - level)[:, None]  # exactly 1 where the group has no higher peak
    share = tl.exp2(peak - level)[:, None]  # exactly 0 where the row sees nothing of the group
    whole_total = tl.fma(total, tl.broadcast_to(share, total.shape), whole_total * fade)
    whole = tl.fma(acc, tl.broadcast_to(share, acc.shape), whole * fade)
    return higher, whole_total, whole


@triton.jit
def _write(out, pass_row, head, real, total, whole, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The weighted mean of the values; total [TILE, any number of columns, all alike]."""
    column = tl.arange(0, PADDED)
    place = (pass_row * HEADS + head) * SIZE
    divisor = tl.where(real, tl.max(total, axis=1), 1.0)
    known = real[:, None] & (column < SIZE)[None, :]
    result = whole / divisor[:, None]
    tl.store(out + place[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=known)


@triton.jit
def _sight(begin, tile, rows, earliest, SHARED: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Positions of a tile's first and last row, and the first key that any of them sees but for pictures."""
    oldest = begin + tile * TILE // SHARED
    newest = begin + tl.minimum((tile * TILE + TILE - 1) // SHARED, rows - 1)
    lowest = begin * 0
    if WINDOW > 0:
        lowest = tl.maximum(oldest - (WINDOW - 1), 0)
    if earliest is not None:
        lowest = tl.maximum(lowest, earliest)
    return oldest, newest, lowest


@triton.jit(
    do_not_specialize=["table_stride", "tile_lanes", "splits", "most_groups"],
    do_not_specialize_on_alignment=["turns", "at", "table", "first", "counters"],
)
def _attend_groups(
    qkv,
    keys,
    values,
    turns,
    at,
    table,
    first,
    out,
    partial,  # [rows, heads, most_groups, PADDED] float32
    peaks,  # [rows, heads, most_groups] float32, as totals
    totals,
    counters,
    table_stride,
    tile_lanes,  # tiles of a turn that have programs of their own
    splits,
    most_groups,  # that a tile sees
    qkv_stride,
    key_stride,
    value_stride,
    scale,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of the widest turn
    ONES: tl.constexpr,
    MERGED: tl.constexpr,  # groups that are read at once
    NEAR_KEYS: tl.constexpr,
    FAR: tl.constexpr,
    FAR_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Some groups of a tile, or of several one after another: every `splits`-th group of every `tile_lanes`-th tile."""
    lane = tl.program_id(0)
    turn = tl.program_id(1)
    split = tl.program_id(2)  # programs start in the order of their numbers: those without a group come last
    kv_head = lane % KV_HEADS
    # All this is older than the kernel before, which may still run.
    first_row = tl.load(turns + turn * 3)
    rows = tl.load(turns + turn * 3 + 1)
    owner = tl.load(turns + turn * 3 + 2)
    begin = tl.load(at + first_row)
    pages = table + owner.to(tl.int64) * table_stride
    earliest = None
    if first is not None:
        earliest = tl.load(first + owner)
    tile = lane // KV_HEADS
    after_previous()

    column = tl.arange(0, PADDED)
    row = tl.arange(0, TILE)
    ones = tl.full([BLOCK, ONES], 1.0, qkv.dtype.element_ty)
    while tile * TILE < rows * SHARED:
        oldest, newest, lowest = _sight(begin, tile, rows, earliest, SHARED, TILE, WINDOW)
        first_group = _group_of(lowest, NEAR_KEYS, FAR, FAR_KEYS)
        last_group = _group_of(newest, NEAR_KEYS, FAR, FAR_KEYS)
        group = first_group + split
        if group <= last_group:
            item = tile * TILE + row
            real = item < rows * SHARED
            pass_row = (first_row + item // SHARED).to(tl.int64)
            head = kv_head * SHARED + item % SHARED
            place = pass_row * qkv_stride + head * SIZE
            known = real[:, None] & (column < SIZE)[None, :]
            query = tl.load(qkv + place[:, None] + column[None, :], mask=known, other=0.0)
            row_at = tl.where(real, begin + item // SHARED, -1)
            line = (pass_row * (KV_HEADS * SHARED) + head) * most_groups  # of scratch
            while group <= last_group:
                start = tl.maximum(_start_of(group, NEAR_KEYS, FAR, FAR_KEYS), lowest) // BLOCK
                last = tl.minimum(_start_of(group + 1, NEAR_KEYS, FAR, FAR_KEYS) - 1, newest) // BLOCK
                peak = tl.full([TILE], float("-inf"), tl.float32)
                total = tl.zeros([TILE, ONES], tl.float32)
                acc = tl.zeros([TILE, PADDED], tl.float32)
                for block in tl.range(start, last + 1, num_stages=STAGES):
                    page = tl.load(pages + block * BLOCK // PAGE).to(tl.int64)
                    peak, total, acc = _add_block(
                        query, ones, row_at, None, None, block, oldest, newest, lowest, newest, earliest,
                        keys + page * key_stride + kv_head * (SIZE * PAGE),
                        values + page * value_stride + kv_head * (SIZE * PAGE),
                        peak, total, acc, scale, SIZE, PAGE, BLOCK, WINDOW, SOFTCAP,
                    )  # fmt: skip
                if first_group == last_group:  # nothing to merge but with nothing
                    nothing = tl.full([TILE], float("-inf"), tl.float32)
                    nothing, total, acc = _add_group(
                        nothing, tl.zeros([TILE, ONES], tl.float32), tl.zeros([TILE, PADDED], tl.float32),
                        peak, total, acc,
                    )  # fmt: skip
                    _write(out, pass_row, head, real, total, acc, KV_HEADS * SHARED, SIZE, PADDED)
                else:
                    part = line + (group - first_group)
                    tl.store(peaks + part, peak, mask=real)
                    tl.store(totals + part, tl.max(total, axis=1), mask=real)
                    tl.store(partial + part[:, None] * PADDED + column[None, :], acc, mask=known)
                group += splits
            if first_group < last_group:
                tl.debug_barrier()  # all threads have stored before one of them says so
                counter = counters + (turn * KV_HEADS + kv_head) * TILES + tile
                others = tl.minimum(last_group - first_group + 1, splits) - 1
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == others:
                    tl.store(counter, 0)
                    whole_peak = tl.full([TILE], float("-inf"), tl.float32)
                    whole_total = tl.zeros([TILE, 1], tl.float32)
                    whole = tl.zeros([TILE, PADDED], tl.float32)
                    for some in range(0, last_group - first_group + 1, MERGED):
                        for offset in tl.static_range(MERGED):
                            mine = real & (some + offset <= last_group - first_group)
                            part = line + (some + offset)
                            peak = tl.load(peaks + part, mask=mine, other=float("-inf"), cache_modifier=".cg")
                            total = tl.load(totals + part, mask=mine, other=0.0, cache_modifier=".cg")
                            acc = tl.load(
                                partial + part[:, None] * PADDED + column[None, :],
                                mask=mine[:, None] & (column < SIZE)[None, :],
                                other=0.0,
                                cache_modifier=".cg",
                            )
                            whole_peak, whole_total, whole = _add_group(
                                whole_peak, whole_total, whole, peak, total[:, None], acc
                            )
                    _write(out, pass_row, head, real, whole_total, whole, KV_HEADS * SHARED, SIZE, PADDED)
        tile += tile_lanes


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["chunks", "at", "table", "first", "pictures"],
)
def _attend_chunks(
    qkv,
    keys,
    values,
    chunks,
    at,
    table,
    first,
    pictures,
    out,
    table_stride,
    qkv_stride,
    key_stride,
    value_stride,
    scale,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    ONES: tl.constexpr,
    NEAR_KEYS: tl.constexpr,
    FAR: tl.constexpr,
    FAR_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """All groups of one tile."""
    lane = tl.program_id(0)
    chunk = tl.num_programs(1) - 1 - tl.program_id(1)  # those at the end of a prompt have most to read
    kv_head = lane % KV_HEADS
    tile = lane // KV_HEADS
    first_row = tl.load(chunks + chunk * 3)
    rows = tl.load(chunks + chunk * 3 + 1)
    owner = tl.load(chunks + chunk * 3 + 2)
    begin = tl.load(at + first_row)
    pages = table + owner.to(tl.int64) * table_stride
    earliest = None
    if first is not None:
        earliest = tl.load(first + owner)
    after_previous()

    if tile * TILE >= rows * SHARED:
        return
    oldest, newest, lowest = _sight(begin, tile, rows, earliest, SHARED, TILE, WINDOW)
    highest = newest
    column = tl.arange(0, PADDED)
    item = tile * TILE + tl.arange(0, TILE)
    real = item < rows * SHARED
    pass_row = (first_row + item // SHARED).to(tl.int64)
    head = kv_head * SHARED + item % SHARED
    place = pass_row * qkv_stride + head * SIZE
    known = real[:, None] & (column < SIZE)[None, :]
    query = tl.load(qkv + place[:, None] + column[None, :], mask=known, other=0.0)
    row_at = tl.where(real, begin + item // SHARED, -1)
    low = None
    high = None
    if pictures is not None:
        low = tl.load(pictures + pass_row * 2, mask=real, other=1)
        high = tl.load(pictures + pass_row * 2 + 1, mask=real, other=0)
        part = low <= high
        reach = tl.min(tl.where(part, low, newest), axis=0)
        if earliest is not None:
            reach = tl.maximum(reach, earliest)
        lowest = tl.minimum(lowest, reach)
        highest = tl.maximum(highest, tl.max(tl.where(part, high, 0), axis=0))
    ones = tl.full([BLOCK, ONES], 1.0, qkv.dtype.element_ty)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE, ONES], tl.float32)
    acc = tl.zeros([TILE, PADDED], tl.float32)
    whole_peak = tl.full([TILE], float("-inf"), tl.float32)
    whole_total = tl.zeros([TILE, ONES], tl.float32)
    whole = tl.zeros([TILE, PADDED], tl.float32)
    start = lowest // BLOCK
    last = highest // BLOCK
    for block in tl.range(start, last + 1, num_stages=STAGES):
        page = tl.load(pages + block * BLOCK // PAGE).to(tl.int64)
        peak, total, acc = _add_block(
            query, ones, row_at, low, high, block, oldest, newest, lowest, highest, earliest,
            keys + page * key_stride + kv_head * (SIZE * PAGE),
            values + page * value_stride + kv_head * (SIZE * PAGE),
            peak, total, acc, scale, SIZE, PAGE, BLOCK, WINDOW, SOFTCAP,
        )  # fmt: skip
        following = (block + 1) * BLOCK
        length = tl.where(following <= FAR, NEAR_KEYS, FAR_KEYS)
        if (following % length == 0) | (block == last):
            whole_peak, whole_total, whole = _add_group(whole_peak, whole_total, whole, peak, total, acc)
            peak = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE, ONES], tl.float32)
            acc = tl.zeros([TILE, PADDED], tl.float32)
    _write(out, pass_row, head, real, whole_total, whole, KV_HEADS * SHARED, SIZE, PADDED)


@on_its_device
def attention(qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages, counters: Tensor) -> Tensor:
    """[rows, layout.width or more] → [rows, heads · size]; the rows' own keys and values are in the pages already.

    Counters are zero before and after. What comes out of rows that no table names is left as it is in memory.
    """
    tables, page = rows.tables, layer.values.shape[2]
    assert tables is not None and FAR % NEAR_KEYS == FAR % FAR_KEYS == 0 and NEAR_KEYS % LONGEST_BLOCK == 0
    assert page >= 16 and qkv.stride(1) == 1 and layer.keys[0].is_contiguous() and layer.values[0].is_contiguous()
    out = torch.empty(len(qkv), spec.layout.heads * spec.layout.size, dtype=qkv.dtype, device=qkv.device)
    kv_heads = layer.values.shape[1]
    if len(tables.turns):
        generated = len(qkv) if tables.generated is None else tables.generated
        cut = generated_cut(spec, kv_heads, qkv.device)
        _launch_groups(out, qkv, spec, rows, tables.turns, layer, counters, generated, cut)
    if len(tables.chunks):
        cut, seen = prompt_cut(spec, kv_heads, qkv), tables.pictures is not None and spec.window > 0
        if not seen and splits_prompts(spec, len(qkv), most_groups(spec, rows.table(layer), page, cut)):
            _launch_groups(out, qkv, spec, rows, tables.chunks, layer, counters, len(qkv), cut)
        else:
            _launch_chunks(out, qkv, spec, rows, layer, cut)
    return out


def groups(keys: int) -> int:
    """Groups of so many keys from position 0 on."""
    return -(-min(keys, FAR) // NEAR_KEYS) + -(-max(keys - FAR, 0) // FAR_KEYS)


def block_keys(page: int, row_bytes: int) -> int:
    """Keys of a block, the same for all rows of a model: their sums depend on it. A key has so many bytes, padded."""
    block = min(page, LONGEST_BLOCK, max(16, BLOCK_BYTES // row_bytes))
    assert page % block == 0
    return block


@cache
def roomy(device: torch.device) -> bool:
    """Has a program much shared memory? Stages and tiles change no bit."""
    if device.type != "cuda":
        return True
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"] >= ROOMY


@dataclass(frozen=True, slots=True)
class TileCut:
    """How the rows of an owner are cut into tiles, and what a program of one has. No bit depends on it."""

    rows: int  # of an owner, at most
    tile: int
    tiles: int  # of such an owner, for one key head
    merged: int  # groups that are read at once in a merge
    stages: int
    warps: int


def padded_size(spec: AttentionSpec) -> int:
    """Entries of a head as tensor cores take them."""
    return max(16, triton.next_power_of_2(spec.layout.size))


def generated_cut(spec: AttentionSpec, kv_heads: int, device: torch.device) -> TileCut:
    """For turns of generated rows."""
    padded, tiles = padded_size(spec), triton.cdiv(WIDEST * (spec.layout.heads // kv_heads), TILE)
    stages, warps = STAGES if roomy(device) else min(STAGES, 5), 2 * WARPS if padded > 128 else WARPS
    return TileCut(WIDEST, TILE, tiles, max(1, min(8, MERGED // padded)), stages, warps)


def prompt_cut(spec: AttentionSpec, kv_heads: int, qkv: Tensor) -> TileCut:
    """For chunks of prompts."""
    padded, items, room = padded_size(spec), CHUNK_ROWS * (spec.layout.heads // kv_heads), roomy(qkv.device)
    fitting = (PROMPT_BYTES if room else PROMPT_BYTES // 2) // (padded * qkv.element_size())
    tile = max(16, min(PROMPT_TILE, fitting, triton.next_power_of_2(items)))
    stages = PROMPT_STAGES if room else min(PROMPT_STAGES, 3)
    warps = PROMPT_WARPS if tile * padded > 64 * 64 else PROMPT_WARPS // 2
    return TileCut(CHUNK_ROWS, tile, triton.cdiv(items, tile), 1, stages, warps)


def most_groups(spec: AttentionSpec, table: Tensor, page: int, cut: TileCut) -> int:
    """That a tile sees."""
    most = groups(table.shape[1] * page)
    if spec.window:  # no more keys than those of its first row and its other rows
        most = min(most, (spec.window + cut.rows - 2) // NEAR_KEYS + 2)
    return most


def splits_prompts(spec: AttentionSpec, count: int, most: int) -> bool:
    """Are so few rows of prompts worth scratch? Tiles of few rows are few programs, which a long text makes slow."""
    scratch = count * spec.layout.heads * most * padded_size(spec) * 4
    return count <= SPLIT_ROWS and scratch <= SPLIT_BYTES


def _launch_groups(
    out: Tensor,
    qkv: Tensor,
    spec: AttentionSpec,
    rows: PassRows,
    turns: Tensor,
    layer: LayerPages,
    counters: Tensor,
    count: int,
    cut: TileCut,
) -> None:
    """`turns`: as of `RowTables`, or its chunks; their rows are among the first `count` of the pass."""
    tables, layout, (kv_heads, page) = rows.tables, spec.layout, layer.values.shape[1:3]
    assert tables is not None
    shared, table, padded = layout.heads // kv_heads, rows.table(layer), padded_size(spec)
    most = most_groups(spec, table, page, cut)
    busy = len(turns) if cut.rows == WIDEST else min(len(turns), triton.cdiv(count, cut.rows) + 1)
    least_tiles = 1 if cut.rows == WIDEST else cut.tiles  # turns are narrow mostly, chunks are full
    splits = min(most, max(LEAST_SPLITS, min(MOST_SPLITS, PROGRAMS // (busy * kv_heads * least_tiles))))
    tile_lanes = max(least_tiles, min(cut.tiles, PROGRAMS // (busy * kv_heads * splits)))
    assert counters.numel() >= len(turns) * kv_heads * cut.tiles
    partial = torch.empty(count, layout.heads, most, padded, dtype=torch.float32, device=qkv.device)
    sums = torch.empty(2, count, layout.heads, most, dtype=torch.float32, device=qkv.device)
    _attend_groups[(kv_heads * tile_lanes, len(turns), splits)](
        qkv,
        layer.keys,
        layer.values,
        turns,
        tables.at,
        table,
        rows.first,
        out,
        partial,
        sums[0],
        sums[1],
        counters,
        table.stride(0),
        tile_lanes,
        splits,
        most,
        qkv.stride(0),
        layer.keys.stride(0),
        layer.values.stride(0),
        spec.factor * LOG2_E,
        kv_heads,
        shared,
        layout.size,
        padded,
        page,
        block_keys(page, padded * qkv.element_size()),
        cut.tile,
        cut.tiles,
        ONES,
        cut.merged,
        NEAR_KEYS,
        FAR,
        FAR_KEYS,
        spec.window,
        spec.softcap * LOG2_E,
        cut.stages,
        num_warps=cut.warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps(qkv.device),
    )


def _launch_chunks(
    out: Tensor, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages, cut: TileCut
) -> None:
    tables, layout, (kv_heads, page) = rows.tables, spec.layout, layer.values.shape[1:3]
    assert tables is not None
    table, padded = rows.table(layer), padded_size(spec)
    _attend_chunks[(kv_heads * cut.tiles, len(tables.chunks))](
        qkv,
        layer.keys,
        layer.values,
        tables.chunks,
        tables.at,
        table,
        rows.first,
        tables.pictures if spec.window else None,
        out,
        table.stride(0),
        qkv.stride(0),
        layer.keys.stride(0),
        layer.values.stride(0),
        spec.factor * LOG2_E,
        kv_heads,
        layout.heads // kv_heads,
        layout.size,
        padded,
        page,
        block_keys(page, padded * qkv.element_size()),
        cut.tile,
        ONES,
        NEAR_KEYS,
        FAR,
        FAR_KEYS,
        spec.window,
        spec.softcap * LOG2_E,
        cut.stages,
        num_warps=cut.warps,
        enable_fp_fusion=False,
        launch_pdl=overlaps(qkv.device),
    )
