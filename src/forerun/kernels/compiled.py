"""CPU loops compiled by numba. Every row runs the same instructions whatever runs beside it.

Rules that keep bits: no loop over one row depends on another row; reductions have trip counts fixed by the model
or by the row's own position; `exp` is our own polynomial, so that vector and scalar forms cannot differ. The numpy
error model keeps checks for division by zero, which would prevent vectorising, out of the loops.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from forerun.compilation import jit

LOG2E = np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
LOWEST = np.float32(-87.0)
HIGHEST = np.float32(88.0)
ONE = np.float32(1)
HALF = np.float32(0.5)
TWO = np.float32(2)
ZERO = np.float32(0)
MINUS_INFINITY = np.float32(-np.inf)
# Taylor coefficients of e^f for |f| <= ln(2)/2; the next term is below half an ulp of float32.
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))

CONTRACT = {"contract", "nsz"}
REASSOCIATE = {"contract", "nsz", "reassoc"}


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """Reinterpret an int32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.int32), generate


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def exponential(x):  # type: ignore[no-untyped-def]
    """e^x in float32; flushes to about 1e-38 below -87."""
    # Not min and max: their care for NaN keeps the loop from being vectorised.
    x = x if x > LOWEST else LOWEST
    x = x if x < HIGHEST else HIGHEST
    n = np.floor(x * LOG2E + HALF)
    f = (x - n * LN2_HIGH) - n * LN2_LOW
    p = ((((((C7 * f + C6) * f + C5) * f + C4) * f + C3) * f + C2) * f + ONE) * f + ONE
    return p * float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@jit(error_model="numpy", fastmath=REASSOCIATE, nogil=True)
def rms_norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """out[r] = x[r] / rms(x[r]) · weight, for x [rows, width]."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        total = ZERO
        for i in range(width):
            total += x[r, i] * x[r, i]
        factor = ONE / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[r, i] = (x[r, i] * factor) * weight[i]


@jit(error_model="numpy", fastmath=REASSOCIATE, nogil=True)
def head_norm(x, first, heads, weight, eps):  # type: ignore[no-untyped-def]
    """RMS norm in place of `heads` heads that start at column `first` of x [rows, columns]."""
    size = weight.shape[0]
    for r in range(x.shape[0]):
        for h in range(heads):
            start = first + h * size
            total = ZERO
            for i in range(size):
                total += x[r, start + i] * x[r, start + i]
            factor = ONE / np.sqrt(total / np.float32(size) + eps)
            for i in range(size):
                x[r, start + i] = (x[r, start + i] * factor) * weight[i]


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def gated(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) · up."""
    return gate / (ONE + exponential(-gate)) * up


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def silu_mul(gate_up, out):  # type: ignore[no-untyped-def]
    """out = silu(gate) · up for gate_up [rows, 2·width], gate first."""
    width = out.shape[1]
    for r in range(out.shape[0]):
        gate = gate_up[r, :width]
        up = gate_up[r, width:]
        target = out[r]
        for i in range(width):
            target[i] = gated(gate[i], up[i])


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def split_digits(x, digits, scale):  # type: ignore[no-untyped-def]
    """Rows of x [rows, width] as two 7-bit digits: digits [2·rows, width], high digits first; scale [rows]."""
    rows, width = x.shape
    for r in range(rows):
        row = x[r]
        high_digits = digits[r]
        low_digits = digits[rows + r]
        bits = row.view(np.int32)
        highest = np.int32(0)
        for i in range(width):
            # Sizes of floats compare like their bits without the sign, and integer maxima are vectorised.
            size = np.int32(bits[i] & np.int32(0x7FFFFFFF))
            highest = size if size > highest else highest
        largest = float_of_bits(highest)
        if largest == ZERO:
            largest = ONE
        factor = np.float32(8127) / largest
        scale[r] = largest / np.float32(8127)
        for i in range(width):
            whole = np.rint(row[i] * factor)
            high = np.rint(whole * np.float32(0.0078125))  # 1/128: exact, as a division by it is
            high_digits[i] = high
            low_digits[i] = whole - high * np.float32(128)


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def joined(high, low, scale):  # type: ignore[no-untyped-def]
    """The product of a number from the products of its digits."""
    return (high * np.float32(128) + low) * scale


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def join_digits(product, scale, weight_scale, out):  # type: ignore[no-untyped-def]
    """out = (128 · high + low) · row scale · weight scale, for product [2·rows, width]."""
    rows, width = out.shape
    for r in range(rows):
        high = product[r]
        low = product[rows + r]
        target = out[r]
        row_scale = scale[r]
        for i in range(width):
            target[i] = joined(high[i], low[i], row_scale * weight_scale[i])


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def join_gated(product, scale, weight_scale, out):  # type: ignore[no-untyped-def]
    """silu_mul(join_digits(product)), row by row: what lies between never leaves the core's cache."""
    rows, width = out.shape
    gate = np.empty(width, np.float32)
    up = np.empty(width, np.float32)
    for r in range(rows):
        high = product[r]
        low = product[rows + r]
        target = out[r]
        row_scale = scale[r]
        for i in range(width):
            gate[i] = joined(high[i], low[i], row_scale * weight_scale[i])
        for i in range(width):
            up[i] = joined(high[width + i], low[width + i], row_scale * weight_scale[width + i])
        for i in range(width):
            target[i] = gated(gate[i], up[i])


@jit(error_model="numpy", nogil=True, parallel=True)
def int_product(digits, weight, out):  # type: ignore[no-untyped-def]
    """out [rows, n] = digits [rows, k] · weight [n, k]ᵀ in exact integers; for CPUs without fbgemm."""
    rows, width = digits.shape
    columns = weight.shape[0]
    for block in prange((columns + 31) // 32):
        for n in range(block * 32, min(columns, block * 32 + 32)):
            line = weight[n]
            for r in range(rows):
                row = digits[r]
                total = np.int32(0)
                for k in range(width):
                    total = np.int32(total + np.int32(np.int32(row[k]) * np.int32(line[k])))
                out[r, n] = np.float32(total)


@jit(error_model="numpy", nogil=True, parallel=True, fastmath=REASSOCIATE)
def float_product(x, weight, out):  # type: ignore[no-untyped-def]
    """out [rows, n] = x [rows, k] · weight [n, k]ᵀ, one dot product per element, always in the same order."""
    rows, width = x.shape
    columns = weight.shape[0]
    for block in prange((columns + 31) // 32):
        for n in range(block * 32, min(columns, block * 32 + 32)):
            line = weight[n]
            for r in range(rows):
                row = x[r]
                total = ZERO
                for k in range(width):
                    total += row[k] * line[k]
                out[r, n] = total


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def add_columns(out, bias):  # type: ignore[no-untyped-def]
    """out += bias, for out [rows, width]."""
    for r in range(out.shape[0]):
        target = out[r]
        for i in range(out.shape[1]):
            target[i] += bias[i]


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def rotate(x, first, heads, size, query_start, position, cos, sin):  # type: ignore[no-untyped-def]
    """Rotary embedding in place; the rotated part of a head is 2·cos.shape[1] wide, halves paired.

    Rows query_start[s] and following are those of sequence s, from position[s] on; cos and sin [positions, half].
    """
    half = cos.shape[1]
    for s in range(position.shape[0]):
        for r in range(query_start[s], query_start[s + 1]):
            at = position[s] + r - query_start[s]
            for h in range(heads):
                a = x[r, first + h * size : first + h * size + half]
                b = x[r, first + h * size + half : first + h * size + 2 * half]
                for i in range(half):
                    left = a[i]
                    right = b[i]
                    a[i] = left * cos[at, i] - right * sin[at, i]
                    b[i] = right * cos[at, i] + left * sin[at, i]


@jit(error_model="numpy", nogil=True)
def store(x, key_column, value_column, query_start, position, table, keys, values):  # type: ignore[no-untyped-def]
    """Write the rows of all sequences into the pages that table [sequences, pages] names, from position[s] on.

    keys [pages, heads, size, page], values [pages, heads, page, size].
    """
    heads, size, page = keys.shape[1:]
    for s in range(position.shape[0]):
        for r in range(query_start[s], query_start[s + 1]):
            at = position[s] + r - query_start[s]
            target = table[s, at // page]
            slot = at % page
            for h in range(heads):
                for i in range(size):
                    keys[target, h, i, slot] = x[r, key_column + h * size + i]
                    values[target, h, slot, i] = x[r, value_column + h * size + i]


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def add_lines(factor, lines, begin, stop, acc):  # type: ignore[no-untyped-def]
    """acc [n] += Σ factor[j] · lines[j] over begin ≤ j < stop, in order of j; eight at a time spare loads."""
    whole = begin + (stop - begin) // 8 * 8
    for j in range(begin, whole, 8):
        f0, f1, f2, f3 = factor[j], factor[j + 1], factor[j + 2], factor[j + 3]
        f4, f5, f6, f7 = factor[j + 4], factor[j + 5], factor[j + 6], factor[j + 7]
        for i in range(acc.shape[0]):
            # Indexed in full: a slice per line would cost two atomic reference counts.
            total = ((acc[i] + f0 * lines[j, i]) + f1 * lines[j + 1, i]) + f2 * lines[j + 2, i]
            total = ((total + f3 * lines[j + 3, i]) + f4 * lines[j + 4, i]) + f5 * lines[j + 5, i]
            acc[i] = (total + f6 * lines[j + 6, i]) + f7 * lines[j + 7, i]
    for j in range(whole, stop):
        f0 = factor[j]
        for i in range(acc.shape[0]):
            acc[i] += f0 * lines[j, i]


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def highest_of(values, halves):  # type: ignore[no-untyped-def]
    """The maximum of values, whose number is a power of two, by halving: vectors instead of a chain."""
    half = values.shape[0] // 2
    for j in range(half):
        halves[j] = values[j] if values[j] > values[j + half] else values[j + half]
    while half > 1:
        half //= 2
        for j in range(half):
            halves[j] = halves[j] if halves[j] > halves[j + half] else halves[j + half]
    return halves[0]


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def sum_of(values, halves):  # type: ignore[no-untyped-def]
    """The sum of values, added in the same tree always."""
    half = values.shape[0] // 2
    for j in range(half):
        halves[j] = values[j] + values[j + half]
    while half > 1:
        half //= 2
        for j in range(half):
            halves[j] += halves[j + half]
    return halves[0]


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def cap(score, scale, softcap):  # type: ignore[no-untyped-def]
    """score ← softcap · tanh(score · scale / softcap) / scale: the caller multiplies by scale."""
    steep = TWO * scale / softcap
    high = softcap / scale
    for j in range(score.shape[0]):
        score[j] = high * (ONE - TWO / (exponential(score[j] * steep) + ONE))


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def attend(x, query_start, position, table, keys, values, scale, window, softcap, out):  # type: ignore[no-untyped-def]
    """Causal attention of all rows; queries are the first columns of x. See `attend_head`."""
    for s in range(position.shape[0]):
        count = query_start[s + 1] - query_start[s]
        for h in range(keys.shape[1]):
            attend_head(x, query_start[s], count, position[s], table[s], keys, values, h, scale, window, softcap, out)


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def attend_head(  # type: ignore[no-untyped-def]
    x, start, count, position, pages, keys, values, h, scale, window, softcap, out
):
    """Rows [start, start+count) of one sequence, with the query heads that share key head h.

    Pages in key order with a running maximum. A row reads only its own keys: `position` + its index + 1 of them,
    or the last `window` of those when window > 0. A `softcap` above 0 bounds the scores.
    """
    kv_heads, size, page = keys.shape[1:]
    group = (out.shape[1] // size) // kv_heads
    score = np.empty(page, np.float32)
    halves = np.empty(page, np.float32)
    best = np.empty((count, group), np.float32)
    weight = np.empty((count, group), np.float32)
    gathered = np.empty((count, group, size), np.float32)
    last_page = (position + count - 1) // page
    first_page = 0
    if window > 0:
        first_page = max(0, position + 1 - window) // page
    best[:] = MINUS_INFINITY
    weight[:] = ZERO
    gathered[:] = ZERO
    for p in range(first_page, last_page + 1):
        key = keys[pages[p], h]
        value = values[pages[p], h]
        for r in range(count):
            stop = min(page, position + r + 1 - p * page)
            begin = 0
            if window > 0:
                begin = max(0, position + r + 1 - window - p * page)
            if stop <= begin:
                continue
            for g in range(group):
                query = x[start + r, (h * group + g) * size : (h * group + g + 1) * size]
                score[:] = ZERO
                add_lines(query, key, 0, size, score)  # key is [size, page]: all scores of the page at once
                if softcap > ZERO:
                    cap(score, scale, softcap)
                for j in range(page):
                    score[j] = score[j] * scale if begin <= j < stop else MINUS_INFINITY
                top = max(best[r, g], highest_of(score, halves))
                acc = gathered[r, g]
                if top > best[r, g]:
                    shrink = ZERO
                    if best[r, g] != MINUS_INFINITY:
                        shrink = exponential(best[r, g] - top)
                    weight[r, g] *= shrink
                    for i in range(size):
                        acc[i] *= shrink
                    best[r, g] = top
                for j in range(page):
                    score[j] = exponential(score[j] - top) if begin <= j < stop else ZERO
                weight[r, g] += sum_of(score, halves)
                add_lines(score, value, begin, stop, acc)
    for r in range(count):
        for g in range(group):
            factor = ONE / weight[r, g]
            target = out[start + r, (h * group + g) * size : (h * group + g + 1) * size]
            for i in range(size):
                target[i] = gathered[r, g, i] * factor
