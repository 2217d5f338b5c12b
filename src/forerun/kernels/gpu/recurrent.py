"""Recurrent layers in decode passes: the convolution and the gated delta rule of a few rows of each sequence.

`DeviceLayer` says what is kept between passes. What a row writes down is read back by another pass, so its arithmetic
has to be the same there: old and new rows go through one loop, whose body exists once in the compiled code.
"""

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.cache.device_recurrent import DeviceLayer
from forerun.kernels.interface import Decay, DeltaLayout, Grid
from forerun.kernels.reference_recurrent import L2_EPS

CHANNELS = 64  # of a program of the convolution
TILE = 2048  # entries of a program's part of a state matrix: 64 registers of each thread of one warp


def aligned(x: Tensor) -> Tensor:
    """Rows one after another from an address that any load may start at: Triton compiles other code for others."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def convolve(x: Tensor, layout: DeltaLayout, grid: Grid, layer: DeviceLayer, weight: Tensor) -> Tensor:
    """silu of a causal convolution per channel of x's first columns: [rows, layout.width]; weight [window, width]."""
    out = torch.empty(len(x), layout.width, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1 and weight.is_contiguous() and grid.width <= layer.rows
    programs = (triton.cdiv(layout.width, CHANNELS), len(grid.slot))
    _convolve[programs](
        x,
        weight,
        out,
        layer.inputs,
        grid.slot,
        layer.kept,
        grid.width,
        x.stride(0),
        WINDOW=layout.window,
        PAST=triton.next_power_of_2(max(1, layout.window - 1)),
        COLUMNS=layout.width,
        ROWS=layer.rows,
        BLOCK=CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["width", "stride"], do_not_specialize_on_alignment=["x", "slots"])
def _convolve(
    x: typing.Any,
    weight: typing.Any,
    out: typing.Any,
    inputs: typing.Any,
    slots: typing.Any,
    kept: typing.Any,
    width: typing.Any,
    stride: typing.Any,
    WINDOW: tl.constexpr,
    PAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of channels of all rows of a sequence at once; element by element, so no row sees another."""
    sequence = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = channel < COLUMNS
    slot = tl.load(slots + sequence).to(tl.int64)
    keep = tl.load(kept + slot)
    line = inputs + slot * ((WINDOW - 1 + ROWS) * COLUMNS) + channel  # [window - 1 + ROWS] rows of the slot
    before = tl.arange(0, PAST)[:, None]
    remembered = inside & (before < WINDOW - 1)
    past = tl.load(line + (keep + before) * COLUMNS, mask=remembered, other=0.0)  # [PAST, BLOCK]

    row = tl.arange(0, ROWS)[:, None]
    mine = inside & (row < width)
    first = x + (sequence * width).to(tl.int64) * stride + channel
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tap in tl.static_range(WINDOW):
        source = row + (tap - (WINDOW - 1))  # a row of this pass, or of the past when negative
        old = tl.load(line + (keep + row + tap) * COLUMNS, mask=mine & (source < 0), other=0.0)
        new = tl.load(first + source * stride, mask=mine & (source >= 0), other=0.0).to(tl.float32)
        factor = tl.load(weight + tap * COLUMNS + channel, mask=inside, other=0.0)
        total = tl.fma(tl.where(source < 0, old, new), factor, total)
    answer = total / (1.0 + tl.exp(-total))
    target = out + (sequence * width + row).to(tl.int64) * COLUMNS + channel
    tl.store(target, answer.to(out.dtype.element_ty), mask=mine)

    new = tl.load(first + row * stride, mask=mine, other=0.0).to(tl.float32)
    tl.debug_barrier()  # all of the past has been read: it may be overwritten
    tl.store(line + before * COLUMNS, past, mask=remembered)
    tl.store(line + (WINDOW - 1 + row) * COLUMNS, new, mask=mine)


def delta_rule(
    mixed: Tensor, gates: Tensor, layout: DeltaLayout, grid: Grid, layer: DeviceLayer, decay: Decay
) -> Tensor:
    """The recurrence over the rows of each sequence, in float32: [rows, layout.values].

    mixed [rows, layout.width] from `convolve`; the first columns of gates are β's inputs, then α's.
    """
    mixed = aligned(mixed)
    out = torch.empty(len(mixed), layout.values, dtype=mixed.dtype, device=mixed.device)
    assert gates.stride(1) == 1 and grid.width <= layer.rows
    keys = triton.next_power_of_2(layout.key_size)
    columns = max(4, min(TILE // keys, triton.next_power_of_2(layout.value_size)))
    programs = (triton.cdiv(layout.value_size, columns), layout.value_heads, len(grid.slot))
    _delta_rule[programs](
        mixed,
        gates,
        out,
        layer.state,
        layer.record,
        grid.slot,
        layer.kept,
        layer.parity,
        decay.rate,
        decay.bias,
        grid.width,
        gates.stride(0),
        layer.record.shape[1],
        KEY_HEADS=layout.key_heads,
        VALUE_HEADS=layout.value_heads,
        KEY_SIZE=layout.key_size,
        VALUE_SIZE=layout.value_size,
        MIXED=layout.width,
        RECORD=layout.record,
        ROWS=layer.rows,
        KEYS=keys,
        COLUMNS=columns,
        SCALE=layout.key_size**-0.5,
        EPS=L2_EPS,
        num_warps=1,  # sums over the keys then stay in one warp, which waits for nobody
    )
    return out


@triton.jit
def prepare(
    query: typing.Any,
    key: typing.Any,
    strength: typing.Any,
    fade: typing.Any,
    rate: typing.Any,
    bias: typing.Any,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
) -> typing.Any:
    """Normalised queries and keys, decay and strength of a row as it came."""
    query, key = query.to(tl.float32), key.to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * SCALE
    key = key * tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
    # softplus: log(1 + y) = 2·artanh(s) with s = y / (2 + y) ≤ 1/3, for the GPU's logarithm is coarse near 1.
    x = fade.to(tl.float32) + bias
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    t = s * s
    series = ((((((t * (1 / 15) + 1 / 13) * t + 1 / 11) * t + 1 / 9) * t + 1 / 7) * t + 1 / 5) * t + 1 / 3) * t + 1.0
    alpha = tl.exp(rate * (tl.maximum(x, 0.0) + 2.0 * s * series))
    return query, key, alpha, 1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))


@triton.jit
def fetch(
    step: typing.Any,
    keep: typing.Any,
    steps: typing.Any,
    recorded: typing.Any,  # where the step's row is, if it is one to replay
    mixed: typing.Any,  # and where, if it is one of the pass
    gate: typing.Any,
    key_at: typing.Any,
    value_at: typing.Any,
    number_at: typing.Any,
    is_key: typing.Any,
    is_column: typing.Any,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
) -> typing.Any:
    """A recorded row: keys, values, decay, strength. And a new one as it came: queries, keys, values, gates.

    What the step's row is not is zeros.
    """
    old, new = step < keep, (step >= keep) & (step < steps)
    return (
        tl.load(recorded + key_at, mask=is_key & old, other=0.0),
        tl.load(recorded + value_at, mask=is_column & old, other=0.0),
        tl.load(recorded + number_at, mask=old, other=0.0),
        tl.load(recorded + number_at + HEADS, mask=old, other=0.0),
        tl.load(mixed + key_at, mask=is_key & new, other=0.0),
        tl.load(mixed + KEYS + key_at, mask=is_key & new, other=0.0),
        tl.load(mixed + KEYS + value_at, mask=is_column & new, other=0.0),
        tl.load(gate, mask=new, other=0.0),
        tl.load(gate + HEADS, mask=new, other=0.0),
    )


@triton.jit(
    do_not_specialize=["width", "gate_stride", "capacity"],
    do_not_specialize_on_alignment=["gates", "slots", "rate", "bias"],
)
def _delta_rule(
    mixed: typing.Any,
    gates: typing.Any,
    out: typing.Any,
    state: typing.Any,
    record: typing.Any,
    slots: typing.Any,
    kept: typing.Any,
    parities: typing.Any,
    rate: typing.Any,
    bias: typing.Any,
    width: typing.Any,
    gate_stride: typing.Any,
    capacity: typing.Any,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MIXED: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """A block of columns of one head's state, through the rows to replay and then the rows of the pass."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    keep = tl.load(kept + slot)
    parity = tl.load(parities + slot).to(tl.int64)
    key = tl.arange(0, KEYS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_SIZE, column < VALUE_SIZE
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS  # value heads that share a key head
    writes_keys = (block == 0) & (head % group == 0)
    tile = state + (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE) + key[:, None] * VALUE_SIZE + column[None, :]
    in_tile = is_key[:, None] & is_column[None, :]
    matrix = tl.load(tile, mask=in_tile, other=0.0)  # [KEYS, COLUMNS]
    fading, shift = tl.load(rate + head), tl.load(bias + head)

    # Step s of the loop is row s of `replayed`, or row s - keep of the pass.
    first = (sequence * width - keep).to(tl.int64)
    replayed = record + (parity * capacity + slot) * (ROWS * RECORD)
    written = record + ((1 - parity) * capacity + slot) * (ROWS * RECORD) - keep * RECORD
    source, gate = mixed + first * MIXED, gates + first * gate_stride + head
    target = out + first * (VALUE_HEADS * VALUE_SIZE) + head * VALUE_SIZE + column
    # Columns of a recorded row: keys of all key heads, values, decays, strengths.
    keys_end: tl.constexpr = KEY_HEADS * KEY_SIZE
    key_at = head // group * KEY_SIZE + key
    value_at = keys_end + head * VALUE_SIZE + column
    number_at = keys_end + VALUE_HEADS * VALUE_SIZE + head
    steps = keep + width
    old_key, old_value, old_alpha, old_beta, query, new_key, new_value, strength, fade = fetch(
        0, keep, steps, replayed, source, gate, key_at, value_at, number_at, is_key, is_column, keys_end, VALUE_HEADS
    )
    step = 0
    while step < steps:
        after = step + 1  # the next row is on its way while this one is worked on
        row, pair = source + after * MIXED, gate + after * gate_stride
        past = replayed + after * RECORD
        old_key_, old_value_, old_alpha_, old_beta_, query_, new_key_, new_value_, strength_, fade_ = fetch(
            after, keep, steps, past, row, pair, key_at, value_at, number_at, is_key, is_column, keys_end, VALUE_HEADS
        )
        old, new = step < keep, step >= keep
        if step == keep:
            tl.store(tile, matrix, mask=in_tile & (keep > 0))
        queries, keys, alpha, beta = prepare(query, new_key, strength, fade, fading, shift, SCALE, EPS)
        keys, values = tl.where(old, old_key, keys), tl.where(old, old_value, new_value.to(tl.float32))
        alpha, beta = tl.where(old, old_alpha, alpha), tl.where(old, old_beta, beta)
        # The answer Sᵀq of the new state, put together from sums over the old one that need not wait for the change.
        read = tl.sum(matrix * queries[:, None], axis=0)
        change = beta * (values - alpha * tl.sum(matrix * keys[:, None], axis=0))
        answer = alpha * read + change * tl.sum(keys * queries, axis=0)
        matrix = tl.fma(keys[:, None], change[None, :], matrix * alpha)

        tl.store(target + step * (VALUE_HEADS * VALUE_SIZE), answer.to(out.dtype.element_ty), mask=is_column & new)
        there = written + step * RECORD
        tl.store(there + key_at, keys, mask=is_key & (new & writes_keys))
        tl.store(there + value_at, values, mask=is_column & new)
        tl.store(there + number_at, alpha, mask=new & (block == 0))
        tl.store(there + number_at + VALUE_HEADS, beta, mask=new & (block == 0))
        old_key, old_value, old_alpha, old_beta = old_key_, old_value_, old_alpha_, old_beta_
        query, new_key, new_value, strength, fade = query_, new_key_, new_value_, strength_, fade_
        step = after
