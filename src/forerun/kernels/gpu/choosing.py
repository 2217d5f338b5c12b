"""Keyed Gumbel sampling over the vocabulary on the device: argmax(l + T·g), noise made where it is used.

Scores are float64, computed step by step as `kernels.portable` does and without fused multiply-adds: the chosen tokens
are those of `sample.reference`, to the bit. Two logarithms in float64 for every token would cost more than reading the
logits. So each token first gets an upper bound of its score, from one float32 logarithm, and exact scores are computed
best bound first, until no bound reaches the best score. That is one or two tokens per block of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import portable
from forerun.kernels.gpu.filtering import Limits, order
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps

BLOCK = 2048  # tokens per program
WARPS = 4  # a warp more is a warp more that repeats the exact scores

BROKEN, UNDECIDED = 1, 2  # what `choose_tokens` may say of a row

_BROKEN, _UNDECIDED = tl.constexpr(BROKEN), tl.constexpr(UNDECIDED)
_INFINITY = tl.constexpr(float("inf"))
_STREAM = tl.constexpr(portable.CHOOSE)
_MANTISSA, _ONE_BITS = tl.constexpr(portable.MANTISSA), tl.constexpr(portable.ONE_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(portable.LN2_HIGH), tl.constexpr(portable.LN2_LOW)
_SQRT2 = tl.constexpr(portable.SQRT2)
_LOG_SERIES = tl.constexpr(portable.LOG_SERIES)
_LOG_TERMS = tl.constexpr(len(portable.LOG_SERIES))
_MASK32, _TO_UNIT = tl.constexpr(portable.MASK32), tl.constexpr(2.0**-32)
_MINUS_LN2 = tl.constexpr(-0.6931471805599453)
# Above the error of `_gumbel_bound` in float32: 33 · 2⁻²² of the coarsest log2 a GPU has, less than 1e-5 from the rest.
_MARGIN = tl.constexpr(1e-4)


@triton.jit
def _log(x):
    """portable.log"""
    bits = x.to(tl.int64, bitcast=True)
    exponent = bits >> 52  # still biased by 1023
    m = ((bits & _MANTISSA) | _ONE_BITS).to(tl.float64, bitcast=True)
    upper = m > tl.full([], _SQRT2, tl.float64)  # a bare constant would be compared in float32
    m = tl.where(upper, m * 0.5, m)
    e = (tl.where(upper, exponent + 1, exponent) - 1023).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = z * _LOG_SERIES[0] + _LOG_SERIES[1]
    for term in tl.static_range(2, _LOG_TERMS):
        total = total * z + _LOG_SERIES[term]
    return e * _LN2_HIGH + (e * _LN2_LOW + 2.0 * s * total)


@triton.jit
def _gumbel(word):
    """portable.gumbel of uint32 words."""
    return -_log(-_log((word.to(tl.float64) + 0.5) * _TO_UNIT))


@triton.jit
def _gumbel_bound(word):
    """At or a little above `_gumbel(word)`: −log(−log u) ≤ −log(1 − u), which float32 can compute near u = 1 too.

    The gap is about half of 1 − u where noise is large, as it is for tokens that win.
    """
    rest = ((word ^ _MASK32).to(tl.float32) + 0.5) * _TO_UNIT  # 1 − u
    return (tl.log2(rest) * _MINUS_LN2 + _MARGIN).to(tl.float64)


@triton.jit
def _words(block, ids, seed, position, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The Philox word of each token of a block, uint32 [BLOCK]; without `ids` a token's id is its column."""
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    choice, place = tl.load(seed + 2).to(tl.uint32), tl.load(position).to(tl.uint32)
    stream = tl.full([], _STREAM, tl.uint32)
    if ids is None:  # four neighbours share a counter
        counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox_impl(counter, place, choice, stream, low, high)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    else:
        column = block * BLOCK + tl.arange(0, BLOCK)
        target = tl.load(ids + column, mask=column < VOCAB, other=0)
        w0, w1, w2, w3 = tl.philox_impl((target >> 2).to(tl.uint32), place, choice, stream, low, high)
        which = target & 3
        words = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    return words


@triton.jit(do_not_specialize=["row_stride"])
def _best_of_block(
    logits,
    ids,
    temperature,
    seed,
    position,
    cut,
    floor,
    values,
    tokens,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score and its token in one block of one row; the score is +∞ where a logit is NaN or +∞."""
    after_previous()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * row_stride + column, mask=column < VOCAB, other=-_INFINITY).to(tl.float32)
    broken = tl.max(tl.where(logit < _INFINITY, 0, 1), 0)
    logit = tl.where(logit < _INFINITY, logit, -_INFINITY)
    if cut is not None:
        survives = (order(logit, column) <= tl.load(cut + row)) & (logit.to(tl.float64) >= tl.load(floor + row))
        logit = tl.where(survives, logit, -_INFINITY)
    heat = tl.load(temperature + row)

    bound = logit.to(tl.float64)
    words = tl.zeros([BLOCK], tl.uint32)
    if heat > 0:
        words = _words(block, ids, seed + row * 3, position + row, VOCAB, BLOCK)
        bound += heat * _gumbel_bound(words)

    best, winner = tl.full([], -_INFINITY, tl.float64), tl.full([], VOCAB, tl.int32)
    top = tl.max(bound, 0)
    place = tl.min(tl.where(bound == top, column, VOCAB), 0)
    # Rounding is monotonic, so a bound stays at or above its score. Each turn rules out a token: the loop ends.
    while (top > -_INFINITY) & ((top > best) | ((top == best) & (place < winner))):
        here = column == place
        score = tl.max(tl.where(here, logit, -_INFINITY), 0).to(tl.float64)
        if heat > 0:
            score += heat * _gumbel(tl.sum(tl.where(here, words, 0), 0))
        better = (score > best) | ((score == best) & (place < winner))
        best = tl.where(better, score, best)
        winner = tl.where(better, place, winner)
        bound = tl.where(here, -_INFINITY, bound)
        top = tl.max(bound, 0)
        place = tl.min(tl.where(bound == top, column, VOCAB), 0)

    to = row * tl.num_programs(0) + block
    tl.store(values + to, tl.where(broken > 0, _INFINITY, best))
    if ids is None:
        tl.store(tokens + to, winner.to(tl.int64))
    else:
        tl.store(tokens + to, tl.load(ids + winner, mask=winner < VOCAB, other=0))


@triton.jit(do_not_specialize=["out_stride"])
def _best_of_row(values, tokens, undecided, out, bad, out_stride, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The best block of a row; the first of equals holds the lower ids."""
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    value = tl.load(values + row * BLOCKS + block, mask=block < BLOCKS, other=-_INFINITY)
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top, block, PADDED), 0)
    usable = (top > -_INFINITY) & (top < _INFINITY)
    token = tl.load(tokens + row * BLOCKS + first, mask=usable, other=0)
    tl.store(out + row * out_stride, token)
    flag = tl.where(usable, 0, _BROKEN)
    if undecided is not None:
        flag = tl.where(usable & (tl.load(undecided + row) > 0), _UNDECIDED, flag)
    tl.store(bad + row, flag)


def scratch_for(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the best score and token of each block: [rows, blocks] float64 and int64."""
    shape = (rows, triton.cdiv(vocab, BLOCK))
    return torch.empty(shape, dtype=torch.float64, device=device), torch.empty(shape, dtype=torch.int64, device=device)


@on_its_device
def choose_tokens(
    logits: Tensor,
    vocab: int,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    out: Tensor,
    bad: Tensor,
    ids: Tensor | None = None,
    limits: Limits | None = None,
) -> None:
    """The token `sample.reference` chooses for each row without processors; the host reads nothing.

    logits [R, V], of which the first `vocab` columns count; temperature [R] float64, 0 for the argmax; seed [R, 3]
    int64: low word, high word, choice; position [R] int64, absolute, of the token being emitted; ids [V] int64,
    ascending: the target id of each column, for a reduced vocabulary; limits: where rows have filters, not with `ids`.
    Into out [R] int64 go target ids, and into bad [R] int32 goes BROKEN where a logit is NaN or +∞ or all are −∞ (out
    is then 0), UNDECIDED where the filters are (out then means nothing), else 0. out may have any stride.
    """
    rows = len(logits)
    if not rows:
        return
    assert logits.stride(1) == 1 and temperature.dtype == torch.float64 and bad.dtype == torch.int32
    assert seed.dtype == position.dtype == out.dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in (temperature, seed, position, bad))
    assert limits is None or ids is None
    cut, floor, undecided = (None, None, None) if limits is None else limits
    values, tokens = scratch_for(rows, vocab, logits.device)
    blocks = triton.cdiv(vocab, BLOCK)
    assert values.shape == tokens.shape == (rows, blocks)
    _best_of_block[(blocks, rows)](
        logits,
        ids,
        temperature,
        seed,
        position,
        cut,
        floor,
        values,
        tokens,
        logits.stride(0),
        VOCAB=vocab,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlaps(logits.device),
    )
    _best_of_row[(rows,)](
        values,
        tokens,
        undecided,
        out,
        bad,
        out.stride(0),
        BLOCKS=blocks,
        PADDED=triton.next_power_of_2(blocks),
        num_warps=1,
        launch_pdl=overlaps(logits.device),
    )
