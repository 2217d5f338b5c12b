"""CPU loops of recurrent layers and of routing, compiled by numba.

Every row runs the same instructions whatever runs beside it: no loop over one row depends on another row, reductions
have trip counts fixed by the model, and `exp` is our own polynomial, so that vector and scalar forms cannot differ. The
recurrence goes further: a state must come out the same when rows are replayed, in whatever pass. So it is written in
single roundings (an explicit fused multiply-add, no fast-math flags), which leave a compiler nothing to choose. The
numpy error model keeps checks for division by zero, which would prevent vectorising, out of the loops.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
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
# Taylor coefficients of e^f for |f| <= ln(2)/2; the next term is below half an ulp of float32.
C2, C3, C4, C5, C6, C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))

CONTRACT = {"contract", "nsz"}
REASSOCIATE = {"contract", "nsz", "reassoc"}
BLOCK = 128  # columns of a state that are worked on together: a whole head of every published model
L2_EPS = np.float32(1e-6)
# log(1 + y) = 2·artanh(s) with s = y / (2 + y) ≤ 1/3: odd powers of s over their exponents.
A3, A5, A7, A9, A11, A13, A15 = (np.float32(1 / n) for n in range(3, 16, 2))


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


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    """a · b + c with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + e^−x)."""
    return ONE / (ONE + exponential(-x))


@jit(error_model="numpy", fastmath=CONTRACT, inline="always")
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + e^x)."""
    size = x if x > ZERO else -x
    y = exponential(-size)
    s = y / (TWO + y)
    t = s * s
    p = ((((((A15 * t + A13) * t + A11) * t + A9) * t + A7) * t + A5) * t + A3) * t + ONE
    return (x if x > ZERO else ZERO) + TWO * s * p


@jit(error_model="numpy", fastmath=REASSOCIATE, nogil=True)
def gated_norm(x, gate, first, weight, eps, out):  # type: ignore[no-untyped-def]
    """RMS norm per head of x [rows, heads · size], times weight, times silu(gate)."""
    size = weight.shape[0]
    for r in range(x.shape[0]):
        for h in range(x.shape[1] // size):
            start = h * size
            total = ZERO
            for i in range(size):
                total += x[r, start + i] * x[r, start + i]
            factor = ONE / np.sqrt(total / np.float32(size) + eps)
            for i in range(size):
                z = gate[r, first + start + i]
                out[r, start + i] = ((x[r, start + i] * factor) * weight[i]) * (z * sigmoid(z))


@jit(error_model="numpy", nogil=True)
def convolve(x, weight, query_start, slots, inputs, kept, recorded, final, out):  # type: ignore[no-untyped-def]
    """`convolve_sequence` for the rows of all sequences."""
    for s in range(slots.shape[0]):
        count = query_start[s + 1] - query_start[s]
        convolve_sequence(x, weight, query_start[s], count, slots[s], inputs, kept, recorded, final, out)


@jit(error_model="numpy", nogil=True)
def convolve_sequence(  # type: ignore[no-untyped-def]
    x, weight, start, count, slot, inputs, kept, recorded, final, out
):
    """A causal convolution per channel, then silu, for rows [start, start + count) of one sequence.

    inputs [slots, past + recorded rows, width]: the last `past` inputs, then the rows of the last pass, of which
    kept[0, slot] are moved into the past first. `recorded`: keep this pass's rows there; otherwise the new past goes
    to `final` [past, width].
    """
    taps, width = weight.shape
    past = taps - 1
    keep = kept[0, slot]
    if keep > 0:
        for j in range(past):
            for c in range(width):
                inputs[slot, j, c] = inputs[slot, j + keep, c]
        kept[0, slot] = 0
    for r in range(count):
        row = start + r
        for c in range(width):
            out[row, c] = ZERO
        for j in range(taps):
            if r + j < past:
                for c in range(width):
                    out[row, c] = fused(weight[j, c], inputs[slot, r + j, c], out[row, c])
            else:
                source = row + j - past
                for c in range(width):
                    out[row, c] = fused(weight[j, c], x[source, c], out[row, c])
        for c in range(width):
            out[row, c] = out[row, c] * sigmoid(out[row, c])
    if recorded:
        for r in range(count):
            for c in range(width):
                inputs[slot, past + r, c] = x[start + r, c]
    else:
        for j in range(past):
            at = count - past + j
            for c in range(width):
                final[j, c] = x[start + at, c] if at >= 0 else inputs[slot, past + at, c]


@jit(error_model="numpy", fastmath=REASSOCIATE, nogil=True)
def prepare_rows(mixed, gates, rate, bias, key_heads, key_size, queries, prepared):  # type: ignore[no-untyped-def]
    """What the recurrence reads of each row: queries [rows, ·] and `prepared` rows, as they are recorded."""
    value_heads = rate.shape[0]
    keys = key_heads * key_size
    values = mixed.shape[1] - 2 * keys
    scale = ONE / np.sqrt(np.float32(key_size))
    for r in range(mixed.shape[0]):
        for h in range(key_heads):
            begin = h * key_size
            total = ZERO
            for i in range(key_size):
                total += mixed[r, begin + i] * mixed[r, begin + i]
            factor = ONE / np.sqrt(total + L2_EPS) * scale
            for i in range(key_size):
                queries[r, begin + i] = mixed[r, begin + i] * factor
            total = ZERO
            for i in range(key_size):
                total += mixed[r, keys + begin + i] * mixed[r, keys + begin + i]
            factor = ONE / np.sqrt(total + L2_EPS)
            for i in range(key_size):
                prepared[r, begin + i] = mixed[r, keys + begin + i] * factor
        for i in range(values):
            prepared[r, keys + i] = mixed[r, 2 * keys + i]
        for h in range(value_heads):
            prepared[r, keys + values + h] = exponential(rate[h] * softplus(gates[r, value_heads + h] + bias[h]))
            prepared[r, keys + values + value_heads + h] = sigmoid(gates[r, h])


@jit(error_model="numpy", nogil=True)
def fade(rows, r, key, value, decay, strength, width, tile, change):  # type: ignore[no-untyped-def]
    """The first half of a row of the recurrence, on `width` columns of one head's state, tile [key size, BLOCK].

    S ← αS, change = β(v − Sᵀk). rows[r] is a recorded row; `key`, `value`, `decay` and `strength` are the columns
    where this head's parts begin.
    """
    size = tile.shape[0]
    alpha = rows[r, decay]
    beta = rows[r, strength]
    for j in range(BLOCK):
        change[j] = ZERO
    for i in range(0, size - 3, 4):
        k0, k1, k2, k3 = rows[r, key + i], rows[r, key + i + 1], rows[r, key + i + 2], rows[r, key + i + 3]
        for j in range(BLOCK):
            t0 = tile[i, j] * alpha
            t1 = tile[i + 1, j] * alpha
            t2 = tile[i + 2, j] * alpha
            t3 = tile[i + 3, j] * alpha
            tile[i, j] = t0
            tile[i + 1, j] = t1
            tile[i + 2, j] = t2
            tile[i + 3, j] = t3
            change[j] = fused(k3, t3, fused(k2, t2, fused(k1, t1, fused(k0, t0, change[j]))))
    for i in range(size // 4 * 4, size):
        for j in range(BLOCK):
            tile[i, j] *= alpha
            change[j] = fused(rows[r, key + i], tile[i, j], change[j])
    for j in range(width):
        change[j] = beta * (rows[r, value + j] - change[j])


@jit(error_model="numpy", nogil=True)
def write(rows, r, key, tile, change):  # type: ignore[no-untyped-def]
    """The second half when nobody reads: S ← S + k·change."""
    for i in range(tile.shape[0]):
        k0 = rows[r, key + i]
        for j in range(BLOCK):
            tile[i, j] = fused(k0, change[j], tile[i, j])


@jit(error_model="numpy", nogil=True)
def write_and_read(rows, queries, r, key, tile, change, answer):  # type: ignore[no-untyped-def]
    """The second half: S ← S + k·change, answer = Sᵀq, summed in order of the rows of the tile."""
    size = tile.shape[0]
    for j in range(BLOCK):
        answer[j] = ZERO
    for i in range(0, size - 3, 4):
        k0, k1, k2, k3 = rows[r, key + i], rows[r, key + i + 1], rows[r, key + i + 2], rows[r, key + i + 3]
        q0, q1, q2, q3 = queries[r, key + i], queries[r, key + i + 1], queries[r, key + i + 2], queries[r, key + i + 3]
        for j in range(BLOCK):
            s0 = fused(k0, change[j], tile[i, j])
            s1 = fused(k1, change[j], tile[i + 1, j])
            s2 = fused(k2, change[j], tile[i + 2, j])
            s3 = fused(k3, change[j], tile[i + 3, j])
            tile[i, j] = s0
            tile[i + 1, j] = s1
            tile[i + 2, j] = s2
            tile[i + 3, j] = s3
            answer[j] = fused(q3, s3, fused(q2, s2, fused(q1, s1, fused(q0, s0, answer[j]))))
    for i in range(size // 4 * 4, size):
        for j in range(BLOCK):
            tile[i, j] = fused(rows[r, key + i], change[j], tile[i, j])
            answer[j] = fused(queries[r, key + i], tile[i, j], answer[j])


@jit(error_model="numpy", nogil=True)
def delta_rule(  # type: ignore[no-untyped-def]
    queries, prepared, query_start, slots, state, record, kept, recorded, final, out
):
    """`delta_sequence` for the rows of all sequences."""
    for s in range(slots.shape[0]):
        start, stop = query_start[s], query_start[s + 1]
        mine = queries[start:stop], prepared[start:stop], out[start:stop]
        delta_sequence(mine[0], mine[1], slots[s], state, record, kept, recorded, final, mine[2])


@jit(error_model="numpy", nogil=True)
def delta_sequence(  # type: ignore[no-untyped-def]
    queries, prepared, slot, state, record, kept, recorded, final, out
):
    """The rows of one sequence, kept[1, slot] recorded rows of the last pass replayed first.

    state [slots, heads, key size, value size] moves on by the replayed rows only: this pass's rows are recorded, or,
    when they are too many, the state after them goes to `final` [heads, key size, value size].
    """
    heads, key_size, value_size = state.shape[1:]
    count = prepared.shape[0]
    keys = queries.shape[1]
    values = heads * value_size
    group = heads * key_size // keys  # value heads that share a key head
    replayed = kept[1, slot]
    old = record[slot]
    tile = np.zeros((key_size, BLOCK), np.float32)
    change = np.zeros(BLOCK, np.float32)
    answer = np.empty(BLOCK, np.float32)
    for h in range(heads):
        key = h // group * key_size
        decay = keys + values + h
        for first in range(0, value_size, BLOCK):
            width = min(BLOCK, value_size - first)
            value = keys + h * value_size + first
            for i in range(key_size):
                for j in range(width):
                    tile[i, j] = state[slot, h, i, first + j]
                for j in range(width, BLOCK):
                    tile[i, j] = ZERO
            for r in range(replayed):
                fade(old, r, key, value, decay, decay + heads, width, tile, change)
                write(old, r, key, tile, change)
            if replayed > 0:
                for i in range(key_size):
                    for j in range(width):
                        state[slot, h, i, first + j] = tile[i, j]
            for r in range(count):
                fade(prepared, r, key, value, decay, decay + heads, width, tile, change)
                write_and_read(prepared, queries, r, key, tile, change, answer)
                for j in range(width):
                    out[r, h * value_size + first + j] = answer[j]
            if not recorded:
                for i in range(key_size):
                    for j in range(width):
                        final[h, i, first + j] = tile[i, j]
    if recorded:
        for r in range(count):
            for i in range(prepared.shape[1]):
                record[slot, r, i] = prepared[r, i]
    kept[1, slot] = 0


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def route(logits, ids, weights):  # type: ignore[no-untyped-def]
    """The largest of each row, largest first, ties to the lower id, and their softmax."""
    rows, count = logits.shape
    top = ids.shape[1]
    for r in range(rows):
        for k in range(top):
            best = -1
            for e in range(count):
                taken = False
                for earlier in range(k):
                    taken = taken or ids[r, earlier] == e
                if not taken and (best < 0 or logits[r, e] > logits[r, best]):
                    best = e
            ids[r, k] = best
        total = ZERO
        for k in range(top):
            weights[r, k] = exponential(logits[r, ids[r, k]] - logits[r, ids[r, 0]])
            total += weights[r, k]
        for k in range(top):
            weights[r, k] = weights[r, k] / total


@jit(error_model="numpy", fastmath=CONTRACT, nogil=True)
def add_rows(part, rows, factors, out):  # type: ignore[no-untyped-def]
    """out[rows[i]] += factors[i] · part[i]."""
    for i in range(part.shape[0]):
        factor = factors[i]
        for c in range(part.shape[1]):
            out[rows[i], c] += factor * part[i, c]
