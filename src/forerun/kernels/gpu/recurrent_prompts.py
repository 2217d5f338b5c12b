"""Recurrent layers in rows of prompts: the gated delta rule of 64 rows at once, as `chunked_delta_rule` has it.

Of a chunk nearly everything can be had without the state before it, so all chunks of a pass are worked on side by side:
`_products` convolves, and multiplies queries and keys with keys; `_solve` finds how the rows of a chunk see each other.
Then `_walk` takes the state through the chunks of each stretch, a block of its columns per program, finds what each row
changes, and leaves the state in the slot. `_answer` reads the states and changes, all chunks side by side again.

A chunk is computed in one way whatever else is in the pass, and a state is as exact in memory as in registers: the bits
of a row do not depend on where its prompt was cut, as long as that was between chunks.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.gpu.recurrent_inputs import convolved, sigmoid, softplus
from forerun.kernels.interface import CHUNK_ROWS, Decay, DeltaLayout, DeviceLayer
from forerun.kernels.reference_recurrent import L2_EPS

BLOCK = 16  # rows of a chunk that are solved one after another; four such blocks side by side
WALK_COLUMNS = 32  # of a state that a program takes along
ANSWER_COLUMNS = 64
SLICE = 64  # of the key size that keys are multiplied over at a time
PRECISION = "tf32x3"  # of products: float32 in three parts, on tensor cores
SMALLEST = 16  # size of a product that Triton takes
PRODUCT_WARPS, SOLVE_WARPS, WALK_WARPS, ANSWER_WARPS = 8, 4, 4, 4
WALK_STAGES = 3  # at most, of the loop over chunks: what does not depend on the state is on its way early


@cache
def stages(device: torch.device, keys: int, columns: int) -> int:
    """Of the loop over chunks, as many as there is shared memory for."""
    if device.type != "cuda":
        return 1
    number = torch.cuda.current_device() if device.index is None else device.index
    memory = driver.active.utils.get_device_properties(number)["max_shared_mem"]
    ahead = 4 * CHUNK_ROWS * (2 * keys + CHUNK_ROWS + columns) + 1024  # bytes of what a chunk loads
    return max(1, min(WALK_STAGES, 1 + (memory - 8 * keys * columns) // ahead))


@on_its_device
def prompt_rows(
    x: Tensor,
    gates: Tensor,
    layout: DeltaLayout,
    chunks: Tensor,
    stretches: Tensor,
    slots: Tensor,
    layer: DeviceLayer,
    convolution: Tensor,
    decay: Decay,
    out: Tensor,
) -> None:
    """Writes the rows of `chunks` in `out`, and what is after each of `stretches` in its slot.

    The chunks of a stretch stand one after another in x, and all but the last have `CHUNK_ROWS` rows.
    """
    early, count, device = overlaps(x.device), len(x), x.device
    assert all(table.is_contiguous() and table.dtype == torch.int32 for table in (chunks, stretches, slots))
    heads, key_heads, key_size, value_size = layout.value_heads, layout.key_heads, layout.key_size, layout.value_size
    line = layer.inputs.shape[1] * layout.width
    queries = torch.empty(count, layout.key_column, device=device)
    keys = torch.empty(count, layout.key_column, device=device)
    products = torch.empty(count, key_heads, 2, CHUNK_ROWS, device=device)  # of keys and of queries with keys
    inverse = torch.empty(count, heads, CHUNK_ROWS, device=device)  # what of the changes asked for a row makes
    seen = torch.empty(count, heads, CHUNK_ROWS, device=device)  # what a row reads of the changes in its chunk
    # Strength; decay from before a chunk to a row, and from there to the chunk's end.
    numbers = torch.empty(3, heads, count, device=device)
    states = torch.empty(len(chunks), heads, key_size, value_size, device=device)  # before each chunk
    changes = torch.empty(count, heads, value_size, device=device)
    wide_keys = max(SMALLEST, triton.next_power_of_2(key_size))
    wide_values = max(SMALLEST, triton.next_power_of_2(value_size))
    _products[(key_heads + triton.cdiv(layout.values, wide_keys), len(chunks))](
        x,
        convolution,
        layer.inputs,
        slots,
        chunks,
        queries,
        keys,
        products,
        out,
        x.stride(0),
        WINDOW=layout.window,
        KEY_HEADS=key_heads,
        KEY_SIZE=key_size,
        VALUES=layout.values,
        LINE=line,
        CHUNK=CHUNK_ROWS,
        KEYS=wide_keys,
        SLICE=min(SLICE, wide_keys),
        SCALE=key_size**-0.5,
        EPS=L2_EPS,
        PRECISION=PRECISION,
        num_warps=PRODUCT_WARPS,
        launch_pdl=early,
    )
    _solve[(heads, len(chunks))](
        gates,
        decay.rate,
        decay.bias,
        chunks,
        products,
        inverse,
        seen,
        numbers,
        gates.stride(0),
        count,
        KEY_HEADS=key_heads,
        HEADS=heads,
        CHUNK=CHUNK_ROWS,
        BLOCK=BLOCK,
        PRECISION=PRECISION,
        num_warps=SOLVE_WARPS,
        launch_pdl=early,
    )
    columns = min(WALK_COLUMNS, wide_values)
    blocks = triton.cdiv(value_size, columns)
    _walk[(blocks, heads, len(stretches))](
        x,
        keys,
        out,
        inverse,
        numbers,
        states,
        changes,
        layer.state,
        layer.inputs,
        layer.kept,
        slots,
        chunks,
        stretches,
        x.stride(0),
        count,
        WINDOW=layout.window,
        PAST=triton.next_power_of_2(max(1, layout.window - 1)),
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        CHANNELS=layout.width,
        LINE=line,
        SHARE=triton.next_power_of_2(triton.cdiv(layout.width, heads * blocks)),
        CHUNK=CHUNK_ROWS,
        KEYS=wide_keys,
        COLUMNS=columns,
        PRECISION=PRECISION,
        STAGES=stages(device, wide_keys, columns),
        num_warps=WALK_WARPS,
        launch_pdl=early,
    )
    columns = min(ANSWER_COLUMNS, wide_values)
    _answer[(triton.cdiv(value_size, columns), heads, len(chunks))](
        chunks,
        queries,
        seen,
        numbers,
        states,
        changes,
        out,
        count,
        KEY_HEADS=key_heads,
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        CHUNK=CHUNK_ROWS,
        KEYS=wide_keys,
        COLUMNS=columns,
        PRECISION=PRECISION,
        num_warps=ANSWER_WARPS,
        launch_pdl=early,
    )


@triton.jit
def _multiply(
    queries,  # of a head
    keys,
    products,
    start,
    count,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of a chunk's keys, and of its queries, with its keys."""
    row, across = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in tl.static_range(0, KEYS, SLICE):
        column = begin + tl.arange(0, SLICE)
        mine = (row < count) & (column < KEY_SIZE)[None, :]
        at = (start + row) * (KEY_HEADS * KEY_SIZE) + column[None, :]
        turned = (start + across) * (KEY_HEADS * KEY_SIZE) + column[:, None]
        turned = tl.load(keys + turned, mask=(across < count) & (column < KEY_SIZE)[:, None], other=0.0)
        key = tl.load(keys + at, mask=mine, other=0.0)
        of_keys += tl.dot(key, turned, input_precision=PRECISION)
        query = tl.load(queries + at, mask=mine, other=0.0)
        of_queries += tl.dot(query, turned, input_precision=PRECISION)
    line = products + (start + row) * (KEY_HEADS * 2 * CHUNK) + across
    tl.store(line, of_keys, mask=row < count)
    tl.store(line + CHUNK, of_queries, mask=row < count)


@triton.jit(do_not_specialize_on_alignment=["slots", "chunks"])
def _products(
    x,
    weight,
    inputs,
    slots,
    chunks,
    queries,
    keys,
    products,
    out,
    x_stride,
    WINDOW: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    LINE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk queries and keys of one head, normalised, and their products with its keys; or a block of values.

    Values wait in `out`, where they fit, until they have been used.
    """
    part, entry = tl.program_id(0), chunks + 3 * tl.program_id(1)
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    if count == 0:
        after_previous()  # programs without work wait too: the next kernel relies on it
        return
    owner = tl.load(entry + 2)
    past = inputs + tl.load(slots + owner).to(tl.int64) * LINE
    # Rows before the chunk are in the pass if the chunk before it is of the same prompt.
    before = chunks + 3 * tl.maximum(tl.program_id(1) - 1, 0)
    joins = (tl.program_id(1) > 0) & (tl.load(before + 1) > 0) & (tl.load(before + 2) == owner)
    oldest = tl.where(joins, -WINDOW, 0)
    after_previous()

    keys_end: tl.constexpr = KEY_HEADS * KEY_SIZE
    channels: tl.constexpr = 2 * keys_end + VALUES
    first = x + start * x_stride
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, KEYS)[None, :]
    known = row < count
    if part < KEY_HEADS:
        inside = column < KEY_SIZE
        mine = inside & known
        at = (start + row) * keys_end + part * KEY_SIZE + column
        channel = part * KEY_SIZE + column
        query = convolved(first, past, weight, channel, inside, row, mine, oldest, x_stride, WINDOW, channels)
        query = query * (tl.rsqrt(tl.sum(query * query, axis=1) + EPS) * SCALE)[:, None]
        tl.store(queries + at, query, mask=mine)
        channel += keys_end
        key = convolved(first, past, weight, channel, inside, row, mine, oldest, x_stride, WINDOW, channels)
        key = key * tl.rsqrt(tl.sum(key * key, axis=1) + EPS)[:, None]
        tl.store(keys + at, key, mask=mine)
        tl.debug_barrier()  # they come back in slices: products of whole rows would need too much shared memory
        _multiply(
            queries + part * KEY_SIZE, keys + part * KEY_SIZE, products + part * (2 * CHUNK), start, count,
            KEY_HEADS, KEY_SIZE, CHUNK, KEYS, SLICE, PRECISION,
        )  # fmt: skip
    else:
        column += (part - KEY_HEADS) * KEYS
        inside, channel = column < VALUES, 2 * keys_end + column
        mine = inside & known
        value = convolved(first, past, weight, channel, inside, row, mine, oldest, x_stride, WINDOW, channels)
        tl.store(out + (start + row) * VALUES + column, value.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _inverse(onto, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + onto)⁻¹ of a matrix [CHUNK, CHUNK] with nothing on its diagonal and above it.

    The blocks on the diagonal are solved row by row, side by side. With D⁻¹, which holds these, and the rest R the
    result is (1 + M)⁻¹D⁻¹ of M = D⁻¹R, and M⁴ = 0 as there are four blocks. Powers of `onto` itself would become huge
    where keys are alike.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    tl.static_assert(BLOCKS == 4)
    block, inner = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    split = tl.reshape(onto, (BLOCKS, BLOCK, BLOCKS, BLOCK))
    solved = -tl.sum(tl.where(diagonal, split, 0.0), axis=2)  # [block, row, column]
    row = inner[None, :, None]
    for step in range(2, BLOCK):
        line = tl.sum(tl.where(row == step, solved, 0.0), axis=1)  # [block, column]
        line += tl.sum(line[:, :, None] * solved, axis=1)  # rows from `step` on count for nothing: zeros in `line`
        solved = tl.where(row == step, line[:, None, :], solved)
    solved += tl.where(row == inner[None, None, :], 1.0, 0.0)
    whole = tl.reshape(tl.where(diagonal, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    at = tl.arange(0, CHUNK)
    rest = tl.where((at // BLOCK)[:, None] > (at // BLOCK)[None, :], onto, 0.0)
    once = tl.dot(whole, rest, input_precision=PRECISION)
    twice = tl.dot(once, once, input_precision=PRECISION)
    thrice = tl.dot(once, twice, input_precision=PRECISION)
    return whole + tl.dot(twice - once - thrice, whole, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["gate_stride", "rows"],
    do_not_specialize_on_alignment=["gates", "chunks", "rate", "bias"],
)
def _solve(
    gates,
    rate,
    bias,
    chunks,
    products,
    inverse,
    seen,
    numbers,
    gate_stride,
    rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """How the rows of a chunk see each other in one value head."""
    head, entry = tl.program_id(0), chunks + 3 * tl.program_id(1)
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    if count == 0:
        after_previous()
        return
    own_rate, own_bias = tl.load(rate + head), tl.load(bias + head)
    after_previous()

    row = tl.arange(0, CHUNK)
    here = row < count
    gate = gates + (start + row) * gate_stride + head
    strength = tl.where(here, sigmoid(tl.load(gate, mask=here, other=0.0).to(tl.float32)), 0.0)
    fading = tl.load(gate + HEADS, mask=here, other=0.0).to(tl.float32) + own_bias
    fade = tl.where(here, own_rate * softplus(fading), 0.0)  # logarithms; rows that are not fade nothing
    # Each decay from a row (column) to a later one is a sum of its own: differences of large sums would be coarse.
    later = row[:, None] > row[None, :]
    between = tl.exp(tl.cumsum(tl.where(later, fade[:, None], 0.0), axis=0))
    left = tl.sum(tl.where(row[:, None] == CHUNK - 1, between, 0.0), axis=0)
    total = rows.to(tl.int64)
    number = numbers + head * total + start + row
    tl.store(number, strength, mask=here)
    tl.store(number + HEADS * total, tl.exp(tl.cumsum(fade, axis=0)), mask=here)
    tl.store(number + 2 * HEADS * total, left, mask=here)

    at = (start + row)[:, None]
    known = here[:, None]
    source = products + (at * KEY_HEADS + head // (HEADS // KEY_HEADS)) * (2 * CHUNK) + row[None, :]
    target = (at * HEADS + head) * CHUNK + row[None, :]
    asked = tl.load(source + CHUNK, mask=known, other=0.0)
    tl.store(seen + target, tl.where(row[:, None] >= row[None, :], asked * between, 0.0), mask=known)
    # Below the diagonal: what a row changes in what a later one writes.
    onto = tl.load(source, mask=known, other=0.0)
    onto = tl.where(later, strength[:, None] * onto * between, 0.0)
    tl.store(inverse + target, _inverse(onto, CHUNK, BLOCK, PRECISION), mask=known)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "chunks", "stretches"])
def _walk(
    x,
    keys,
    values,
    inverse,
    numbers,
    states,
    changes,
    state,
    inputs,
    kept,
    slots,
    chunks,
    stretches,
    x_stride,
    rows,
    WINDOW: tl.constexpr,
    PAST: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    LINE: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of columns of one head's state through the chunks of a stretch, and a share of the inputs after it."""
    block, head, entry = tl.program_id(0), tl.program_id(1), stretches + 3 * tl.program_id(2)
    begin, length = tl.load(entry), tl.load(entry + 1)
    if length == 0:
        after_previous()
        return
    slot = tl.load(slots + tl.load(entry + 2)).to(tl.int64)
    start = tl.load(chunks + 3 * begin).to(tl.int64)
    count = (length - 1) * CHUNK + tl.load(chunks + 3 * (begin + length - 1) + 1)
    key, row = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_SIZE, column < VALUE_SIZE
    in_tile = is_key[:, None] & is_column[None, :]
    tile = (head * KEY_SIZE + key[:, None]) * VALUE_SIZE + column[None, :]
    slot_tile = state + slot * (HEADS * KEY_SIZE * VALUE_SIZE) + tile
    matrix = tl.load(slot_tile, mask=in_tile, other=0.0)  # [KEYS, COLUMNS]
    after_previous()

    total = rows.to(tl.int64)
    number = numbers + head * total + start
    key_head = head // (HEADS // KEY_HEADS)
    for step in tl.range(0, length, num_stages=STAGES):
        offset = step * CHUNK + row
        here = offset < count
        at = (start + offset)[:, None]
        keyed = here[:, None] & is_key[None, :]
        place = (at * HEADS + head) * VALUE_SIZE + column[None, :]
        placed = here[:, None] & is_column[None, :]
        chunk = (begin + step).to(tl.int64) * (HEADS * KEY_SIZE * VALUE_SIZE)
        tl.store(states + chunk + tile, matrix, mask=in_tile)
        # Each operand is loaded where it is used, keys twice: they would fill the registers otherwise.
        near = tl.load(keys + (at * KEY_HEADS + key_head) * KEY_SIZE + key[None, :], mask=keyed, other=0.0)
        known = tl.dot(near, matrix, input_precision=PRECISION)
        value = tl.load(values + place, mask=placed, other=0.0).to(tl.float32)
        strength = tl.load(number + offset, mask=here, other=0.0)
        faded = tl.load(number + HEADS * total + offset, mask=here, other=0.0)
        wanted = (value - known * faded[:, None]) * strength[:, None]
        solved = tl.load(inverse + (at * HEADS + head) * CHUNK + row[None, :], mask=here[:, None], other=0.0)
        change = tl.dot(solved, wanted, input_precision=PRECISION)
        tl.store(changes + place, change, mask=placed)
        left = tl.load(number + 2 * HEADS * total + offset, mask=here, other=0.0)
        all_faded = tl.load(number + HEADS * total + tl.minimum((step + 1) * CHUNK, count) - 1)
        across = (start + offset)[None, :]  # [1, CHUNK]
        near = tl.load(
            keys + (across * KEY_HEADS + key_head) * KEY_SIZE + key[:, None],
            mask=here[None, :] & is_key[:, None],
            other=0.0,
        )
        added = tl.dot(near, change * left[:, None], input_precision=PRECISION)
        matrix = tl.fma(matrix, all_faded, added)
    tl.store(slot_tile, matrix, mask=in_tile)

    # The inputs that the next rows of this prompt will convolve: the last of this pass, or older ones if it has few.
    part = head * tl.cdiv(VALUE_SIZE, COLUMNS) + block
    channel = part * SHARE + tl.arange(0, SHARE)[None, :]
    index = tl.arange(0, PAST)[:, None]
    remembered = (channel < CHANNELS) & (index < WINDOW - 1)
    source = count - (WINDOW - 1) + index
    line = inputs + slot * LINE + channel
    old = tl.load(line + (count + index) * CHANNELS, mask=remembered & (source < 0), other=0.0)
    new = tl.load(x + (start + source) * x_stride + channel, mask=remembered & (source >= 0), other=0.0)
    tl.debug_barrier()  # the old ones have been read: they may be overwritten
    tl.store(line + index * CHANNELS, tl.where(source < 0, old, new.to(tl.float32)), mask=remembered)
    if part == 0:
        tl.store(kept + slot, 0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["chunks"])
def _answer(
    chunks,
    queries,
    seen,
    numbers,
    states,
    changes,
    out,
    rows,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk's rows read of the state before it and of the changes in it: a block of columns of one head."""
    block, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, count = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
    after_previous()
    if count == 0:
        return

    key, row = tl.arange(0, KEYS), tl.arange(0, CHUNK)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column, here = key < KEY_SIZE, column < VALUE_SIZE, row < count
    at = (start + row)[:, None]
    keyed = here[:, None] & is_key[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    query = tl.load(queries + (at * KEY_HEADS + key_head) * KEY_SIZE + key[None, :], mask=keyed, other=0.0)
    tile = ((chunk.to(tl.int64) * HEADS + head) * KEY_SIZE + key[:, None]) * VALUE_SIZE + column[None, :]
    matrix = tl.load(states + tile, mask=is_key[:, None] & is_column[None, :], other=0.0)
    faded = tl.load(numbers + (HEADS + head) * rows.to(tl.int64) + start + row, mask=here, other=0.0)
    answer = tl.dot(query, matrix, input_precision=PRECISION) * faded[:, None]
    share = tl.load(seen + (at * HEADS + head) * CHUNK + row[None, :], mask=here[:, None], other=0.0)
    place = (at * HEADS + head) * VALUE_SIZE + column[None, :]
    placed = here[:, None] & is_column[None, :]
    change = tl.load(changes + place, mask=placed, other=0.0)
    answer += tl.dot(share, change, input_precision=PRECISION)
    tl.store(out + place, answer.to(out.dtype.element_ty), mask=placed)
