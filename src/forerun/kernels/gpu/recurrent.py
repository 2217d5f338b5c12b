"""Recurrent layers: the convolution and the gated delta rule of all rows of a pass, generated ones and prompts.

The two kinds of rows have a form each, see `recurrent_prompts` for prompts. Of generated rows a sequence has a few, and
`DeviceLayer` says what is kept of them between passes. All that they can do side by side happens in one launch, which
records them: convolution, norms, gates. A second one takes the recorded rows one after another, first those of the last
pass that count and then the new ones: one loop for both, whose body exists once in the compiled code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.gpu.recurrent_inputs import convolved, sigmoid, softplus
from forerun.kernels.gpu.recurrent_prompts import prompt_rows
from forerun.kernels.interface import Decay, DeltaLayout, DeviceLayer, PassRows
from forerun.kernels.reference_recurrent import L2_EPS

WARPS = 16  # of a program that prepares rows: four entries for each thread
TILE = 2048  # entries of a program's part of a state matrix: 64 registers of each thread of one warp
LANES = 8  # of a warp that share a column of such a part
STAGES = 4  # of the loop over rows: three are on their way while one is worked on


def recurrence(
    x: Tensor, gates: Tensor, layout: DeltaLayout, rows: PassRows, layer: DeviceLayer, convolution: Tensor, decay: Decay
) -> Tensor:
    """The mixed rows of `rows.tables`: [rows, layout.values]; convolution [window, layout.width].

    The first columns of x are convolved; the first columns of gates are β's inputs, then α's. A slot has rows of one
    kind in a pass, and rows of prompts come before generated ones: nothing is left to replay, before and after.
    """
    tables = rows.tables
    assert tables is not None
    assert x.data_ptr() % 16 == 0, "Triton compiles other code for other addresses"
    assert x.stride(1) == gates.stride(1) == 1 and convolution.is_contiguous()
    out = torch.empty(len(x), layout.values, dtype=x.dtype, device=x.device)
    if len(tables.turns):
        generated_rows(x, gates, layout, tables.turns, rows.slot, layer, convolution, decay, out)
    if len(tables.stretches):
        prompt_rows(x, gates, layout, tables.chunks, tables.stretches, rows.slot, layer, convolution, decay, out)
    return out


@on_its_device
def generated_rows(
    x: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    turns: Tensor,
    slots: Tensor,
    layer: DeviceLayer,
    convolution: Tensor,
    decay: Decay,
    out: Tensor,
) -> None:
    """Writes the rows of `turns` in `out`, and records them."""
    early = overlaps(x.device)
    assert turns.is_contiguous() and slots.is_contiguous() and turns.dtype == slots.dtype == torch.int32
    # Queries and their products with keys.
    queries = torch.empty(len(x), layout.key_column + layout.key_heads, device=x.device)
    keys, values = triton.next_power_of_2(layout.key_size), layout.values
    parts = layout.key_heads + triton.cdiv(values, keys) + 1
    _prepare[(parts, len(turns))](
        x,
        gates,
        convolution,
        queries,
        layer.inputs,
        layer.record,
        turns,
        slots,
        layer.kept,
        layer.parity,
        decay.rate,
        decay.bias,
        x.stride(0),
        gates.stride(0),
        layer.record.shape[1],
        WINDOW=layout.window,
        PAST=triton.next_power_of_2(max(1, layout.window - 1)),
        KEY_HEADS=layout.key_heads,
        HEADS=layout.value_heads,
        HEADS_BLOCK=triton.next_power_of_2(layout.value_heads),
        KEY_SIZE=layout.key_size,
        VALUES=values,
        RECORD=layout.record,
        ROWS=layer.rows,
        BLOCK=keys,
        SCALE=layout.key_size**-0.5,
        EPS=L2_EPS,
        num_warps=WARPS,
        launch_pdl=early,
    )
    columns = max(4, min(TILE // keys, triton.next_power_of_2(layout.value_size)))
    _delta_rule[(triton.cdiv(layout.value_size, columns), layout.value_heads, len(turns))](
        queries,
        out,
        layer.state,
        layer.record,
        turns,
        slots,
        layer.kept,
        layer.parity,
        layer.record.shape[1],
        KEY_HEADS=layout.key_heads,
        VALUE_HEADS=layout.value_heads,
        KEY_SIZE=layout.key_size,
        VALUE_SIZE=layout.value_size,
        RECORD=layout.record,
        ROWS=layer.rows,
        KEYS=keys,
        COLUMNS=columns,
        RUN=max(1, keys // LANES),
        STAGES=STAGES,
        num_warps=1,  # sums over the keys then stay in one warp, which waits for no other
        launch_pdl=early,
    )


@triton.jit
def _convolve(
    first,  # of x, at the sequence's first row
    line,  # of the slot's inputs: WINDOW - 1 rows of the past from `keep` on
    weight,
    channel,  # [1, BLOCK]
    inside,
    keep,
    width,
    stride,
    WINDOW: tl.constexpr,
    PAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """silu of the convolution of a block of channels of all rows, rounded: [ROWS, BLOCK]; moves the past on."""
    before = tl.arange(0, PAST)[:, None]
    remembered = inside & (before < WINDOW - 1)
    past = tl.load(line + (keep + before) * COLUMNS + channel, mask=remembered, other=0.0)  # [PAST, BLOCK]
    row = tl.arange(0, ROWS)[:, None]
    mine = inside & (row < width)
    mixed = convolved(first, line + keep * COLUMNS, weight, channel, inside, row, mine, 0, stride, WINDOW, COLUMNS)
    new = tl.load(first + row * stride + channel, mask=mine, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all of the past has been read: it may be overwritten
    tl.store(line + before * COLUMNS + channel, past, mask=remembered)
    tl.store(line + (WINDOW - 1 + row) * COLUMNS + channel, new, mask=mine)
    return mixed


@triton.jit
def _prepare_head(
    head,
    line,
    first,
    weight,
    keep,
    width,
    stride,
    queries,  # of the sequence's rows [ROWS, 1], as the record
    record,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAST: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
):
    """Queries and keys of a key head, normalised, and their products."""
    column = tl.arange(0, BLOCK)[None, :]
    inside, known = column < SIZE, (tl.arange(0, ROWS) < width)[:, None]
    channel = head * SIZE + column
    query = _convolve(first, line, weight, channel, inside, keep, width, stride, WINDOW, PAST, CHANNELS, ROWS)
    channel += KEY_HEADS * SIZE
    key = _convolve(first, line, weight, channel, inside, keep, width, stride, WINDOW, PAST, CHANNELS, ROWS)
    query = tl.where(inside, query, 0.0)
    key = tl.where(inside, key, 0.0)
    query = query * (tl.rsqrt(tl.sum(query * query, axis=1) + EPS) * SCALE)[:, None]
    key = key * tl.rsqrt(tl.sum(key * key, axis=1) + EPS)[:, None]
    tl.store(queries + head * SIZE + column, query, mask=inside & known)
    tl.store(queries + KEY_HEADS * SIZE + head, tl.sum(query * key, axis=1)[:, None], mask=known)
    tl.store(record + head * SIZE + column, key, mask=inside & known)


@triton.jit
def _prepare_gates(
    gates,  # of the sequence's rows [ROWS, 1], as the record from its decays on
    record,
    rate,
    bias,
    width,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decay and strength of all heads."""
    head = tl.arange(0, BLOCK)[None, :]
    inside = head < HEADS
    mine = inside & (tl.arange(0, ROWS) < width)[:, None]
    strength = tl.load(gates + head, mask=mine, other=0.0).to(tl.float32)
    x = tl.load(gates + HEADS + head, mask=mine, other=0.0).to(tl.float32)
    x += tl.load(bias + head, mask=inside, other=0.0)
    tl.store(record + head, tl.exp(tl.load(rate + head, mask=inside, other=0.0) * softplus(x)), mask=mine)
    tl.store(record + HEADS + head, sigmoid(strength), mask=mine)


@triton.jit(
    do_not_specialize=["gate_stride", "capacity"],
    do_not_specialize_on_alignment=["gates", "turns", "slots", "rate", "bias"],
)
def _prepare(
    x,
    gates,
    weight,
    queries,
    inputs,
    record,
    turns,
    slots,
    kept,
    parities,
    rate,
    bias,
    x_stride,
    gate_stride,
    capacity,
    WINDOW: tl.constexpr,
    PAST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """One of: queries and keys of a head, a block of values, the gates; of all rows of a sequence."""
    part, turn = tl.program_id(0), turns + 3 * tl.program_id(1)
    start, width = tl.load(turn).to(tl.int64), tl.load(turn + 1)
    if width == 0:
        after_previous()  # programs without work wait too: the next kernel relies on it
        return
    slot = tl.load(slots + tl.load(turn + 2)).to(tl.int64)
    keep = tl.load(kept + slot)
    parity = tl.load(parities + slot).to(tl.int64)
    after_previous()
    keys_end: tl.constexpr = KEY_HEADS * KEY_SIZE
    channels: tl.constexpr = 2 * keys_end + VALUES
    value_parts: tl.constexpr = (VALUES + BLOCK - 1) // BLOCK
    row = tl.arange(0, ROWS)[:, None]
    first = x + start * x_stride
    line = inputs + slot * ((WINDOW - 1 + ROWS) * channels)
    # Columns of a recorded row: keys of all key heads, values, decays, strengths.
    target = record + ((1 - parity) * capacity + slot) * (ROWS * RECORD) + row * RECORD
    if part < KEY_HEADS:
        asked = queries + (start + row) * (keys_end + KEY_HEADS)
        _prepare_head(
            part, line, first, weight, keep, width, x_stride, asked, target,
            KEY_HEADS, KEY_SIZE, WINDOW, PAST, channels, ROWS, BLOCK, SCALE, EPS,
        )  # fmt: skip
    elif part < KEY_HEADS + value_parts:
        column = (part - KEY_HEADS) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside, channel = column < VALUES, 2 * keys_end + column
        value = _convolve(first, line, weight, channel, inside, keep, width, x_stride, WINDOW, PAST, channels, ROWS)
        tl.store(target + keys_end + column, value, mask=inside & (row < width))
    else:
        numbers = target + keys_end + VALUES
        _prepare_gates(gates + (start + row) * gate_stride, numbers, rate, bias, width, HEADS, ROWS, HEADS_BLOCK)


@triton.jit
def _sum_keys(x):
    """[KEYS / RUN, RUN, COLUMNS] → [COLUMNS]: first within threads, then across."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["turns", "slots"])
def _delta_rule(
    queries,
    out,
    state,
    record,
    turns,
    slots,
    kept,
    parities,
    capacity,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of columns of one head's state, through the rows to replay and then the rows of the pass."""
    block, head, turn = tl.program_id(0), tl.program_id(1), turns + 3 * tl.program_id(2)
    start, width = tl.load(turn).to(tl.int64), tl.load(turn + 1)
    if width == 0:
        after_previous()
        return
    slot = tl.load(slots + tl.load(turn + 2)).to(tl.int64)
    keep = tl.load(kept + slot)
    parity = tl.load(parities + slot).to(tl.int64)
    # Keys in runs: those of a thread are neighbours, which it reads together.
    key = RUN * tl.arange(0, KEYS // RUN)[:, None] + tl.arange(0, RUN)[None, :]
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_SIZE, column < VALUE_SIZE
    tile = state + (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + key[:, :, None] * VALUE_SIZE + column
    in_tile = is_key[:, :, None] & is_column
    matrix = tl.load(tile, mask=in_tile, other=0.0)  # [KEYS / RUN, RUN, COLUMNS]
    after_previous()

    # Step s of the loop is row s of `replayed`, or row s - keep of the pass.
    first = start - keep
    replayed = record + (parity * capacity + slot) * (ROWS * RECORD)
    written = record + ((1 - parity) * capacity + slot) * (ROWS * RECORD) - keep * RECORD
    keys_end: tl.constexpr = KEY_HEADS * KEY_SIZE
    source = queries + first * (keys_end + KEY_HEADS)
    target = out + first * (VALUE_HEADS * VALUE_SIZE) + head * VALUE_SIZE + column
    key_head = head // (VALUE_HEADS // KEY_HEADS)  # value heads share key heads
    key_at = key_head * KEY_SIZE + key
    value_at = keys_end + head * VALUE_SIZE + column
    number_at = keys_end + VALUE_HEADS * VALUE_SIZE + head
    product_at = keys_end + key_head
    for step in tl.range(0, keep + width, num_stages=STAGES):
        row = tl.where(step < keep, replayed, written) + step * RECORD
        asked = source + tl.maximum(step, keep) * (keys_end + KEY_HEADS)
        keys = tl.load(row + key_at, mask=is_key, other=0.0)
        query = tl.load(asked + key_at, mask=is_key, other=0.0)
        values = tl.load(row + value_at, mask=is_column, other=0.0)
        alpha = tl.load(row + number_at)
        beta = tl.load(row + number_at + VALUE_HEADS)
        product = tl.load(asked + product_at)
        if step == keep:
            tl.store(tile, matrix, mask=in_tile & (keep > 0))
        # The answer Sᵀq of the new state, put together from sums over the old one that need not wait for the change.
        read = _sum_keys(matrix * query[:, :, None])
        change = beta * (values - alpha * _sum_keys(matrix * keys[:, :, None]))
        answer = alpha * read + change * product
        matrix = tl.fma(keys[:, :, None], change, matrix * alpha)
        there = target + step * (VALUE_HEADS * VALUE_SIZE)
        tl.store(there, answer.to(out.dtype.element_ty), mask=is_column & (step >= keep))
