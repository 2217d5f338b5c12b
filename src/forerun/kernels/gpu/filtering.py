"""top-k, top-p and min-p on the device: where each row's sorted tokens are cut, without sorting the vocabulary.

All filters keep a prefix of the tokens by (−logit, id). The best tokens of a row are found by the peaks of small
blocks: at least `need` tokens reach the need-th highest peak. They are gathered, and one program compares them all
with each other: how many come before each, with which mass. Masses are the integers of `portable.weights`, so sums are
exact.

A nucleus with more tokens than were gathered is left open: the host decides such a row by its own way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import portable
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import LARGEST_TOP_K

BLOCK = 2048  # tokens per program that reads a row
MOST_PEAKS = 1024
NEED = LARGEST_TOP_K  # tokens that are gathered at least: a nucleus of that size is always decided
GATHERED = 1024  # at most; more than `NEED` because a block may hold several
TOGETHER = 32  # tokens that all are compared with at once, by the thread that holds each: no sum crosses threads

_INFINITY = tl.constexpr(float("inf"))
_ID_BITS = tl.constexpr(20)  # of an order number; the rest is the logit
ALL = tl.constexpr(1 << 62)  # above every order number
_MANTISSA, _TO_INTEGER = tl.constexpr(portable.MANTISSA), tl.constexpr(portable.TO_INTEGER)
_POWER = tl.constexpr(portable.TO_INTEGER + 1023.0 + portable.WEIGHT_BITS)
_LOWEST, _LOG2_E = tl.constexpr(portable.LOWEST_EXPONENT), tl.constexpr(portable.LOG2_E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(portable.LN2_HIGH), tl.constexpr(portable.LN2_LOW)
_EXP_SERIES = tl.constexpr(portable.EXP_SERIES)
_EXP_TERMS = tl.constexpr(len(portable.EXP_SERIES))


@triton.jit
def read_logits(line, column, VOCAB: tl.constexpr):
    """Logits as float32; −∞ where there is none, or one that nobody can choose."""
    logit = tl.load(line + column, mask=column < VOCAB, other=-_INFINITY).to(tl.float32)
    return tl.where(logit < _INFINITY, logit, -_INFINITY)


@triton.jit
def order(logit, token):
    """An int64 that ascends as tokens come: higher logits first, then lower ids; −0 counts as 0."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.uint32, bitcast=True)
    place = tl.where(bits >> 31 != 0, bits, bits ^ 0x7FFFFFFF)
    return (place.to(tl.int64) << _ID_BITS) | token.to(tl.int64)


@triton.jit
def _weights(x):
    """portable.weights of float64 x ≤ 0"""
    lowest = tl.full([], _LOWEST, tl.float64)  # a bare constant would be compared in float32
    x = tl.where(x < lowest, lowest, x)
    k = tl.floor(x * _LOG2_E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    total = r * _EXP_SERIES[0] + _EXP_SERIES[1]
    for term in tl.static_range(2, _EXP_TERMS):
        total = total * r + _EXP_SERIES[term]
    power = (k + _POWER).to(tl.int64, bitcast=True) << 52
    scaled = total * power.to(tl.float64, bitcast=True)
    return (scaled + _TO_INTEGER).to(tl.int64, bitcast=True) & _MANTISSA


@triton.jit(do_not_specialize=["row_stride"])
def _find_peaks(logits, peaks, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, SMALL: tl.constexpr):
    """The best logit of every SMALL tokens."""
    after_previous()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logit = read_logits(logits + row * row_stride, block * BLOCK + tl.arange(0, BLOCK), VOCAB)
    count: tl.constexpr = BLOCK // SMALL
    best = tl.max(tl.reshape(logit, (count, SMALL)), axis=1)
    tl.store(peaks + (row * tl.num_programs(0) + block) * count + tl.arange(0, count), best)


@triton.jit
def _find_limit(
    peaks,
    temperature,
    top_k,
    top_p,
    offset,
    bests,
    floors,
    limits,
    counts,
    totals,
    PEAKS: tl.constexpr,
    PADDED: tl.constexpr,
    NEED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """What a row gathers: tokens from its limit on. Also its best logit and min-p as a floor."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    line = peaks + row * PEAKS
    number = tl.arange(0, PADDED)
    peak = tl.load(line + number, mask=number < PEAKS, other=-_INFINITY)
    best = tl.max(peak, axis=0)
    hot = tl.load(temperature + row) > 0
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    one = tl.full([], 1.0, tl.float64)
    limit = tl.full([], _INFINITY, tl.float32)
    if hot & (best > -_INFINITY) & ((most > 0) | (share < one)):
        need = tl.where(most > 0, most, NEED)
        reach = tl.zeros([PADDED], tl.int32)  # peaks at or above each
        for start in range(0, PEAKS, TOGETHER):
            other = start + tl.arange(0, TOGETHER)
            value = tl.load(line + other, mask=other < PEAKS, other=-_INFINITY)
            reach += tl.sum((value[:, None] >= peak[None, :]).to(tl.int32), axis=0)
        limit = tl.max(tl.where(reach >= need, peak, -_INFINITY), axis=0)
    tl.store(bests + row, best)
    floor = best.to(tl.float64) + tl.load(offset + row)
    tl.store(floors + row, tl.where(hot, floor, -_INFINITY))
    tl.store(limits + row, limit)
    tl.store(counts + row, 0)
    tl.store(totals + row, tl.zeros([], tl.int64))


@triton.jit(do_not_specialize=["row_stride"])
def _gather(
    logits,
    temperature,
    top_k,
    top_p,
    bests,
    limits,
    counts,
    totals,
    orders,
    masses,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Order numbers and masses of the tokens from the limit on, in any order; the mass of all where it is asked for."""
    after_previous()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    limit, one = tl.load(limits + row), tl.full([], 1.0, tl.float64)
    if limit < _INFINITY:
        column = block * BLOCK + tl.arange(0, BLOCK)
        logit = read_logits(logits + row * row_stride, column, VOCAB)
        taken = (logit >= limit) & (logit > -_INFINITY)
        whole = (tl.load(top_k + row) == 0) & (tl.load(top_p + row) < one)
        if whole | (tl.max(taken.to(tl.int32), axis=0) > 0):
            cold = one / tl.load(temperature + row)
            mass = _weights((logit.to(tl.float64) - tl.load(bests + row).to(tl.float64)) * cold)
            if whole:
                tl.atomic_add(totals + row, tl.sum(mass, axis=0))
            place = tl.atomic_add(counts + row + tl.zeros([BLOCK], tl.int32), 1, mask=taken)
            kept = taken & (place < GATHERED)
            tl.store(orders + row * GATHERED + place, order(logit, column), mask=kept)
            tl.store(masses + row * GATHERED + place, mass, mask=kept)


@triton.jit
def _decide(
    top_k,
    top_p,
    limits,
    counts,
    totals,
    orders,
    masses,
    cuts,
    undecided,
    GATHERED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The order number of a row's last survivor."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    cut, left_open = tl.full([], ALL, tl.int64), tl.full([], 0, tl.int32)
    if tl.load(limits + row) < _INFINITY:
        number = tl.arange(0, GATHERED)
        mine = tl.load(orders + row * GATHERED + number, mask=number < count, other=ALL)
        mass = tl.load(masses + row * GATHERED + number, mask=number < count, other=0)
        rank = tl.zeros([GATHERED], tl.int32)
        before = tl.zeros([GATHERED], tl.int64)
        for start in range(0, tl.minimum(count, GATHERED), TOGETHER):
            other = start + tl.arange(0, TOGETHER)
            theirs = tl.load(orders + row * GATHERED + other, mask=other < count, other=ALL)
            weight = tl.load(masses + row * GATHERED + other, mask=other < count, other=0)
            first = theirs[:, None] < mine[None, :]
            rank += tl.sum(first.to(tl.int32), axis=0)
            before += tl.sum(tl.where(first, weight[:, None], 0), axis=0)
        most, share = tl.load(top_k + row), tl.load(top_p + row)
        alive = (number < count) & ((most == 0) | (rank < most))
        found = tl.sum(tl.where(alive, mass, 0), axis=0)
        if share < tl.full([], 1.0, tl.float64):
            total = tl.where(most == 0, tl.load(totals + row), found)
            target = tl.maximum(tl.ceil(total.to(tl.float64) * share).to(tl.int64), 1)
            alive = alive & (before < target)
            left_open = (found < target).to(tl.int32)
        left_open = tl.where(count > GATHERED, 1, left_open)
        cut = tl.where(left_open > 0, cut, tl.max(tl.where(alive, mine, -1), axis=0))
    tl.store(cuts + row, cut)
    tl.store(undecided + row, left_open)


class Limits(NamedTuple):
    """Which tokens of each row survive: those up to `cut` that reach `floor`."""

    cut: Tensor  # [R] int64, an order number
    floor: Tensor  # [R] float64
    undecided: Tensor  # [R] int32: 1 where the host must decide


@on_its_device
def find_limits(
    logits: Tensor, vocab: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, offset: Tensor
) -> Limits:
    """What `reference.survivors` keeps of each row; the host reads nothing.

    logits [R, V], of which the first `vocab` columns count; temperature [R] float64, 0 for rows without filters; top_k
    [R] int32, up to LARGEST_TOP_K, 0 for none; top_p [R] float64; offset [R] float64: `reference.min_p_offset`.
    """
    rows, device = len(logits), logits.device
    assert logits.stride(1) == 1 and top_k.dtype == torch.int32
    assert temperature.dtype == top_p.dtype == offset.dtype == torch.float64
    assert all(tensor.is_contiguous() for tensor in (temperature, top_k, top_p, offset))
    small = max(2, triton.next_power_of_2(triton.cdiv(vocab, MOST_PEAKS)))
    blocks = triton.cdiv(vocab, BLOCK)
    peak_count = blocks * (BLOCK // small)

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    peaks = room(rows, peak_count, dtype=torch.float32)
    best, limit = room(rows, dtype=torch.float32), room(rows, dtype=torch.float32)
    floor, cut = room(rows, dtype=torch.float64), room(rows, dtype=torch.int64)
    count, undecided = room(rows, dtype=torch.int32), room(rows, dtype=torch.int32)
    total, orders = room(rows, dtype=torch.int64), room(rows, GATHERED, dtype=torch.int64)
    masses = torch.empty_like(orders)
    early, stride = overlaps(device), logits.stride(0)
    _find_peaks[(blocks, rows)](logits, peaks, stride, vocab, BLOCK, small, num_warps=4, launch_pdl=early)
    _find_limit[(rows,)](
        peaks,
        temperature,
        top_k,
        top_p,
        offset,
        best,
        floor,
        limit,
        count,
        total,
        PEAKS=peak_count,
        PADDED=triton.next_power_of_2(peak_count),
        NEED=NEED if vocab > GATHERED else MOST_PEAKS + 1,  # of a small vocabulary all
        TOGETHER=TOGETHER,
        num_warps=8,
        launch_pdl=early,
    )
    _gather[(blocks, rows)](
        logits,
        temperature,
        top_k,
        top_p,
        best,
        limit,
        count,
        total,
        orders,
        masses,
        stride,
        VOCAB=vocab,
        BLOCK=BLOCK,
        GATHERED=GATHERED,
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=early,
    )
    _decide[(rows,)](
        top_k,
        top_p,
        limit,
        count,
        total,
        orders,
        masses,
        cut,
        undecided,
        GATHERED=GATHERED,
        TOGETHER=TOGETHER,
        num_warps=8,
        enable_fp_fusion=False,
        launch_pdl=early,
    )
    return Limits(cut, floor, undecided)
