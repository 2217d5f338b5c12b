"""The numba kernels of `compiled`: serial, one row each, the arithmetic of `portable` step by step.

numba keeps compiled code by the date of this file alone: after a change of a constant in `portable`, touch this file.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.compilation import jit
from forerun.kernels import portable

Logits = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# constants for the kernels, typed: a Python integer would turn uint64 arithmetic into float64
_20, _32 = np.uint64(20), np.uint64(32)
_MASK = np.uint64(portable.MASK32)
_M0, _M1 = np.uint64(portable.PHILOX_M0), np.uint64(portable.PHILOX_M1)
_W0, _W1 = np.uint64(portable.PHILOX_W0), np.uint64(portable.PHILOX_W1)
_52 = np.int64(52)
_MANTISSA, _ONE_BITS = np.int64(portable.MANTISSA), np.int64(portable.ONE_BITS)
_TO_INTEGER, _TO_INTEGER_BITS = portable.TO_INTEGER, np.uint64(portable.TO_INTEGER_BITS)
_POWER = portable.TO_INTEGER + 1023.0 + portable.WEIGHT_BITS
_LOWEST = portable.LOWEST_EXPONENT
_LOG2_E, _HIGH, _LOW, _SQRT2 = portable.LOG2_E, portable.LN2_HIGH, portable.LN2_LOW, portable.SQRT2
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11 = portable.EXP_SERIES
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9, _L10 = portable.LOG_SERIES
BLOCK = 256  # tokens looked at together
LARGEST_GUMBEL = 22.88  # a little above −log(−log(1 − 2⁻³³))
_LN2_UP = 0.69315  # a little above ln 2

# No fastmath: it would let the compiler fuse or reorder, and the bits would no longer be those of `portable`.
_kernel = jit(nogil=True, error_model="numpy")


@_kernel
def scaled_exp(x: float) -> Any:
    """portable.scaled_exp"""
    x = _LOWEST if x < _LOWEST else x
    k = np.floor(x * _LOG2_E + 0.5)
    r = (x - k * _HIGH) - k * _LOW
    t = r * _E0 + _E1
    t = t * r + _E2
    t = t * r + _E3
    t = t * r + _E4
    t = t * r + _E5
    t = t * r + _E6
    t = t * r + _E7
    t = t * r + _E8
    t = t * r + _E9
    t = t * r + _E10
    t = t * r + _E11
    power = np.float64(k + _POWER).view(np.int64) << _52
    return t * np.int64(power).view(np.float64)


@_kernel
def weight(x: float) -> Any:
    """portable.weights"""
    return np.float64(scaled_exp(x) + _TO_INTEGER).view(np.int64) & _MANTISSA


@_kernel
def log(x: float) -> Any:
    """portable.log"""
    bits = np.float64(x).view(np.int64)
    exponent = bits >> _52
    m = np.int64((bits & _MANTISSA) | _ONE_BITS).view(np.float64)
    if m > _SQRT2:
        m = m * 0.5
        exponent += 1
    e = np.float64(exponent) - 1023.0
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    t = z * _L0 + _L1
    t = t * z + _L2
    t = t * z + _L3
    t = t * z + _L4
    t = t * z + _L5
    t = t * z + _L6
    t = t * z + _L7
    t = t * z + _L8
    t = t * z + _L9
    t = t * z + _L10
    return e * _HIGH + (e * _LOW + 2.0 * s * t)


@_kernel
def fill_words(first: int, stream: Any, position: Any, choice: Any, k0: Any, k1: Any, words: Words) -> None:
    """The Philox words of the tokens from id `first` on, into `words`; `first` and its size are multiples of 4."""
    for n in range(len(words) // 4):
        c0, c1, c2, c3 = np.uint64((first >> 2) + n), position, choice, stream
        u0, u1 = k0, k1
        for _ in range(10):
            # the masks change nothing: they tell the compiler that a product of 32-bit halves will do
            first_product, second_product = (c0 & _MASK) * _M0, (c2 & _MASK) * _M1
            c0, c1 = (second_product >> _32) ^ c1 ^ u0, second_product & _MASK
            c2, c3 = (first_product >> _32) ^ c3 ^ u1, first_product & _MASK
            u0, u1 = (u0 + _W0) & _MASK, (u1 + _W1) & _MASK
        words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3] = c0, c1, c2, c3


@_kernel
def descending(logit: Any) -> Any:
    """A uint32 that sorts ascending as logits sort descending; −0 counts as 0."""
    bits = np.float32(logit + np.float32(0.0)).view(np.uint32)
    return np.uint32(bits if bits >> np.uint32(31) else ~bits & np.uint32(0x7FFFFFFF))


@_kernel
def alive(logit: Any, token: int, cut: Any, cut_id: int) -> bool:
    """Whether a token stands in the prefix, by (−logit, id), that ends with (cut, cut_id)."""
    return logit > cut or (logit == cut and token <= cut_id)


@_kernel
def any_from(row: Logits, start: int, stop: int, floor: float) -> Any:
    """Whether a logit in the range reaches the floor. A plain reduction, which the compiler turns into vectors."""
    found: Any = 0
    for i in range(start, stop):
        found |= np.int32(np.float64(row[i]) >= floor)
    return found != 0


@_kernel
def gather(row: Logits, cut: Any, cut_id: int, ids: Integers) -> int:
    """The ids of the prefix that ends with (cut, cut_id), ascending, into `ids`; returns their number."""
    count, size = 0, len(row)
    whole = size - size % 16
    for start in range(0, whole, 16):
        found: Any = 0
        for j in range(16):  # one vector comparison: most of a row is far below the cut
            found |= np.int32(row[start + j] >= cut)
        if found:
            for i in range(start, start + 16):
                if alive(row[i], i, cut, cut_id):
                    ids[count] = i
                    count += 1
    for i in range(whole, size):
        if alive(row[i], i, cut, cut_id):
            ids[count] = i
            count += 1
    return count


@_kernel
def prefix_end(row: Logits, ids: Integers, mass: Integers, target: int) -> Any:
    """The first token, by (−logit, id), at which the summed mass of the candidates reaches `target`.

    `ids` ascend, `mass` is per candidate. A radix select by three digits of the logit's bits: no sort, and no input for
    which it is slow.
    """
    histogram = np.empty(2048, dtype=np.int64)
    found = np.uint32(0)  # the digits decided so far
    missing = target
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        histogram[:] = 0
        here, above, digits = np.uint32(shift), np.uint32(shift + width), np.uint32((1 << width) - 1)
        for n in range(len(ids)):
            key = descending(row[ids[n]])
            if shift == 21 or key >> above == found:
                histogram[(key >> here) & digits] += mass[n]
        digit = 0
        while missing > histogram[digit]:
            missing -= histogram[digit]
            digit += 1
        found = np.uint32((found << np.uint32(width)) | np.uint32(digit))
    for n in range(len(ids)):
        if descending(row[ids[n]]) == found:  # equal logits: the lower ids first
            missing -= mass[n]
            if missing <= 0:
                return row[ids[n]], ids[n]
    return row[ids[0]], ids[0]  # not reached: the mass of all candidates is at least the target


@_kernel
def count_from(row: Logits, floor: float) -> Any:
    """How many logits reach the floor."""
    count: Any = 0
    for i in range(len(row)):
        count += np.int64(np.float64(row[i]) >= floor)
    return count


@_kernel
def top_k_cut(row: Logits, top: float, top_k: int, ids: Integers, mass: Integers) -> Any:
    """The k-th token by (−logit, id). Only the logits near the top become candidates."""
    reach = 4.0
    while reach < 1e4 and count_from(row, top - reach) < top_k:
        reach *= 2.0
    floor = np.float32(top - reach) if reach < 1e4 else np.float32(-np.inf)
    count = gather(row, floor, len(row), ids)
    mass[:count] = 1
    return prefix_end(row, ids[:count], mass, min(top_k, count))


@_kernel
def weigh(row: Logits, top: float, inverse: float, mass: Integers) -> int:
    """The softmax weights of a row into `mass`; returns their sum. Integers: any order gives the same sum."""
    total = 0
    for i in range(len(row)):
        w = weight((np.float64(row[i]) - top) * inverse)
        mass[i] = w
        total += w
    return total


@_kernel
def mass_from(row: Logits, mass: Integers, floor: float) -> int:
    """The summed mass of the logits that reach the floor."""
    total = 0
    for i in range(len(row)):
        total += mass[i] if np.float64(row[i]) >= floor else 0
    return total


@_kernel
def enough(total: Any, top_p: float) -> Any:
    """The summed weight at which top-p is reached."""
    return max(np.int64(1), np.int64(np.ceil(np.float64(total) * top_p)))


@_kernel
def top_p_cut(
    row: Logits, top: float, inverse: float, top_p: float, cut: Any, cut_id: int, ids: Integers, mass: Integers
) -> Any:
    """The token, by (−logit, id) up to the cut, at which the summed probability reaches top_p.

    Without a top-k cut before it, only the logits near the top become candidates: just enough to reach top_p.
    """
    if cut_id >= 0:
        count = gather(row, cut, cut_id, ids)
        for n in range(count):
            mass[n] = weight((np.float64(row[ids[n]]) - top) * inverse)
        return prefix_end(row, ids[:count], mass, enough(mass[:count].sum(), top_p))
    target = enough(weigh(row, top, inverse, mass), top_p)
    reach = 3.0
    while reach < 50.0 and mass_from(row, mass, np.float64(np.float32(top - reach / inverse))) < target:
        reach *= 1.6
    floor = np.float32(top - reach / inverse) if reach < 50.0 else np.float32(-np.inf)
    count = gather(row, floor, len(row), ids)
    for n in range(count):
        mass[n] = mass[ids[n]]  # ids ascend, so n ≤ ids[n]: nothing is overwritten before it is read
    return prefix_end(row, ids[:count], mass, target)


@_kernel
def cut_row(row: Logits, best: int, temperature: float, top_k: int, top_p: float, offset: float, scratch: Any) -> Any:
    """The last survivor (logit, id) of top-k, top-p and min-p; `offset` is min-p as a distance from the best logit.

    `scratch` is int64 [2, V].
    """
    cut, cut_id = np.float32(-np.inf), -1  # nothing equals −inf and comes before id 0: all finite logits survive
    top, ids, mass = np.float64(row[best]), scratch[0], scratch[1]
    if 0 < top_k < len(row):
        cut, cut_id = top_k_cut(row, top, top_k, ids, mass)
    if top_p < 1.0:
        cut, cut_id = top_p_cut(row, top, 1.0 / temperature, top_p, cut, cut_id, ids, mass)
    floor = top + offset
    if np.float64(cut) < floor:  # the lowest float32 at or above the floor, with every id
        cut, cut_id = np.float32(floor), len(row)
        if np.float64(cut) < floor:
            cut = np.nextafter(cut, np.float32(np.inf))
    return cut, cut_id


@_kernel
def score(logit: Any, temperature: float, word: Any) -> Any:
    """l + T·g"""
    return np.float64(logit) + temperature * -log(-log((np.float64(word) + 0.5) * 2.0**-32))


@_kernel
def any_promising(row: Logits, start: int, stop: int, temperature: float, words: Words, highest: float) -> Any:
    """Whether l + T·g might reach `highest` for a token in the range; `words` begins at `start`.

    −log(−log u) ≤ −log(1 − u), and the bits of a double, read as a number, are a lower bound of its log2.
    """
    found: Any = 0
    scale = temperature * _LN2_UP * 2.0**-32
    for i in range(start, stop):
        rest = np.uint64((_MASK - words[i - start]) | _TO_INTEGER_BITS).view(np.float64) - (_TO_INTEGER - 0.5)
        bits = np.float64(rest * 2.0**-32).view(np.uint64) >> _20
        log2 = np.uint64(bits | _TO_INTEGER_BITS).view(np.float64) - (_TO_INTEGER + 1023.0 * 2.0**32)
        found |= np.int32(np.float64(row[i]) - scale * log2 >= highest)
    return found != 0


@_kernel
def pick_any(
    row: Logits, best: int, temperature: float, cut: Any, cut_id: int, position: Any, choice: Any, k0: Any, k1: Any
) -> int:
    """argmax(l + T·g) over the survivors, equal scores to the lower id; logarithms only where they could matter."""
    size, reach, stream = len(row), temperature * LARGEST_GUMBEL, np.uint64(0)
    words = np.empty(BLOCK, dtype=np.uint64)
    fill_words(best & ~3, stream, position, choice, k0, k1, words[:4])
    chosen, highest = best, score(row[best], temperature, words[best & 3])
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        if not any_from(row, start, stop, max(np.float64(cut), highest - reach)):
            continue
        fill_words(start, stream, position, choice, k0, k1, words)
        if not any_promising(row, start, stop, temperature, words, highest):
            continue
        for i in range(start, stop):
            if alive(row[i], i, cut, cut_id) and np.float64(row[i]) + reach >= highest:
                value = score(row[i], temperature, words[i - start])
                if value > highest or (value == highest and i < chosen):
                    chosen, highest = i, value
    return chosen


@_kernel
def pick_some(
    row: Logits, ids: Integers, best: int, temperature: float, position: Any, choice: Any, k0: Any, k1: Any
) -> int:
    """The same over a few survivors, given by their ascending ids."""
    reach, stream = temperature * LARGEST_GUMBEL, np.uint64(0)
    words = np.empty(4, dtype=np.uint64)
    fill_words(best & ~3, stream, position, choice, k0, k1, words)
    chosen, highest, filled = best, score(row[best], temperature, words[best & 3]), best >> 2
    for i in ids:
        if np.float64(row[i]) + reach < highest:
            continue
        if i >> 2 != filled:
            filled = i >> 2
            fill_words(i & ~3, stream, position, choice, k0, k1, words)
        value = score(row[i], temperature, words[i & 3])
        if value > highest or (value == highest and i < chosen):
            chosen, highest = i, value
    return chosen


@_kernel
def spread(row: Logits, best: int, temperature: float, cut: Any, cut_id: int, out: npt.NDArray[np.float64]) -> None:
    """The probabilities of the survivors into `out`, which holds zeros."""
    total = 0.0
    top, inverse = np.float64(row[best]), 1.0 / temperature
    for i in range(len(row)):
        if alive(row[i], i, cut, cut_id):
            out[i] = scaled_exp((np.float64(row[i]) - top) * inverse)
            total += out[i]
    for i in range(len(row)):
        out[i] /= total


@_kernel
def race(distribution: npt.NDArray[np.float64], stream: Any, position: Any, choice: Any, k0: Any, k1: Any) -> int:
    """argmin(E / p) with keyed exponential noise E, equal times to the lower id; −1 when nothing is positive."""
    winner, fastest = -1, np.inf
    words = np.empty(BLOCK, dtype=np.uint64)
    filled = -1
    for i in range(len(distribution)):
        if distribution[i] > 0.0:
            if i // BLOCK != filled:
                filled = i // BLOCK
                fill_words(filled * BLOCK, stream, position, choice, k0, k1, words)
            time = -log((np.float64(words[i % BLOCK]) + 0.5) * 2.0**-32) / distribution[i]
            if time < fastest:
                winner, fastest = i, time
    return winner
