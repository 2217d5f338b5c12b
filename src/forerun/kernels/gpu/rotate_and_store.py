"""From a fused projection to attention, in one launch: head norms, rotary embedding, keys and values into pages."""

import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import HeadLayout, LayerPages, PassRows


@triton.jit
def _norm(left, right, rest, weight, pair, other, eps, SIZE: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """RMS norm of one head, rounded as `head_norm` does before `rotate` reads it."""
    left_weight = tl.load(weight + pair, mask=pair < HALF, other=0.0)
    right_weight = tl.load(weight + HALF + pair, mask=pair < HALF, other=0.0)
    squares = tl.sum(left * left + right * right, axis=0)
    if 2 * HALF < SIZE:
        rest_weight = tl.load(weight + other, mask=other < SIZE, other=0.0)
        squares += tl.sum(rest * rest, axis=0)
    scale = tl.rsqrt(squares / SIZE + eps)
    left = (left * scale * left_weight).to(DTYPE).to(tl.float32)
    right = (right * scale * right_weight).to(DTYPE).to(tl.float32)
    if 2 * HALF < SIZE:
        rest = rest * scale * rest_weight
    return left, right, rest


@triton.jit
def _write(target, left, right, rest, pair, other, STEP: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr):
    tl.store(target + pair * STEP, left.to(target.dtype.element_ty), mask=pair < HALF)
    tl.store(target + (HALF + pair) * STEP, right.to(target.dtype.element_ty), mask=pair < HALF)
    if 2 * HALF < SIZE:
        tl.store(target + other * STEP, rest.to(target.dtype.element_ty), mask=other < SIZE)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["owners", "positions", "table"])
def _rotate_and_store(
    qkv,
    keys,
    values,
    owners,  # [rows], as positions
    positions,
    table,
    cos,
    sin,
    query_norm,
    key_norm,
    value_norm,
    eps,
    table_stride,
    qkv_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """One head of one row. The thread that has column i of a pair also has column i + HALF, so in place is safe."""
    row = tl.program_id(0)
    head = tl.program_id(1)  # queries, then keys, then values
    # Positions, pages and angles are older than the projection, which may still run.
    owner = tl.load(owners + row)
    at = tl.load(positions + row)
    page = tl.load(table + owner.to(tl.int64) * table_stride + at // PAGE).to(tl.int64)
    slot = at % PAGE
    pair = tl.arange(0, HALF_BLOCK)
    other = 2 * HALF + tl.arange(0, REST_BLOCK)  # columns that are not rotated
    turn = (row if BY_ROW else at).to(tl.int64) * HALF + pair
    turns = (pair < HALF) & (head < HEADS + KV_HEADS)
    cosine = tl.load(cos + turn, mask=turns, other=0.0)
    sine = tl.load(sin + turn, mask=turns, other=0.0)
    after_previous()
    source = qkv + row.to(tl.int64) * qkv_stride + head * SIZE
    dtype: tl.constexpr = qkv.dtype.element_ty
    left = tl.load(source + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    right = tl.load(source + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    rest = tl.load(source + other, mask=other < SIZE, other=0.0).to(tl.float32)

    if head < HEADS + KV_HEADS:
        if head < HEADS:
            if query_norm is not None:
                left, right, rest = _norm(left, right, rest, query_norm, pair, other, eps, SIZE, HALF, dtype)
        else:
            if key_norm is not None:
                left, right, rest = _norm(left, right, rest, key_norm, pair, other, eps, SIZE, HALF, dtype)
        turned = left * cosine - right * sine
        right = right * cosine + left * sine
        left = turned
    else:
        if value_norm is not None:
            left, right, rest = _norm(left, right, rest, value_norm, pair, other, eps, SIZE, HALF, dtype)

    if head < HEADS:
        _write(source, left, right, rest, pair, other, 1, SIZE, HALF)
    elif head < HEADS + KV_HEADS:
        place = keys + page * key_stride + (head - HEADS) * (SIZE * PAGE) + slot
        _write(place, left, right, rest, pair, other, PAGE, SIZE, HALF)
    else:
        place = values + page * value_stride + ((head - HEADS - KV_HEADS) * PAGE + slot) * SIZE
        _write(place, left, right, rest, pair, other, 1, SIZE, HALF)


@on_its_device
def rotate_and_store(
    qkv: Tensor,
    layout: HeadLayout,
    rows: PassRows,
    layer: LayerPages,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    value_norm: Tensor | None = None,
    by_row: bool = False,
) -> None:
    """Queries of qkv are normed and rotated in place, keys on their way to the pages; values are at most normed there.

    cos and sin [positions, half] float32 of all positions, or one entry for each row of the pass; norms [size] float32.
    Keys and values in qkv stay as they were. Rows that pad the pass write to their owner's spare page.
    """
    half, table, tables = cos.shape[1], rows.table(layer), rows.tables
    assert tables is not None and (not by_row or len(cos) >= len(qkv))
    assert cos.is_contiguous() and sin.is_contiguous() and 2 * half <= layout.size
    assert qkv.stride(1) == 1 and layer.keys[0].is_contiguous() and layer.values[0].is_contiguous()
    _rotate_and_store[(len(qkv), layout.heads + 2 * layout.kv_heads)](
        qkv,
        layer.keys,
        layer.values,
        tables.owner,
        tables.at,
        table,
        cos,
        sin,
        query_norm,
        key_norm,
        value_norm,
        eps,
        table.stride(0),
        qkv.stride(0),
        layer.keys.stride(0),
        layer.values.stride(0),
        layout.heads,
        layout.kv_heads,
        layout.size,
        layer.values.shape[2],
        half,
        triton.next_power_of_2(half),
        triton.next_power_of_2(max(1, layout.size - 2 * half)),
        by_row,
        num_warps=1,
        launch_pdl=overlaps(qkv.device),
    )
