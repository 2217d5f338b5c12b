"""Bias, suppression, grammar masks and penalties on the device: what changes logits before the temperature.

Every edit computes in float64 and rounds once to float32, in the order and with the operations of
`sample.processors`, without fused multiply-adds: the edited logits are the reference's, to the bit. What a batch slot
has used is a table on the device that `remember` keeps up to date, so rounds follow each other without the host.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import WIDEST

BLOCK = 2048  # tokens per program
WARPS = 8  # eight tokens per thread: each has its own float64 division, which is long code
MASK_BITS = 32  # tokens per word of a grammar mask
ONCE = 2  # what one more token of the answer adds to its number in `used`; 1 stands for a token of the prompt

_INFINITY = tl.constexpr(float("inf"))
_MASK_BITS, _ONCE = tl.constexpr(MASK_BITS), tl.constexpr(ONCE)


class EditTables(NamedTuple):
    """The edits of every batch slot S, for a vocabulary padded to V, a multiple of 32. Static: graphs hold them."""

    settings: Tensor  # [S, 4] float64: 1 where a bias applies; repetition, presence and frequency penalty
    bias: Tensor  # [S, V] float64, −∞ for suppressed tokens; float32 would lose bits of what was asked for
    used: Tensor  # [S, V] int32: 2 · times in the answer, plus an odd 1 for tokens seen before the slot was taken
    masked: Tensor  # [S, 16] int32: whether a row has a grammar mask; row r comes after r drafts
    masks: Tensor  # [S, 16, V / 32] int32: bit i of word w allows token 32 · w + i


@triton.jit(
    do_not_specialize=["rows", "first", "slot_stride", "draft_stride"],
    do_not_specialize_on_alignment=["drafts"],  # they begin anywhere in a line of tokens
)
def _edit(
    logits,
    ids,
    drafts,
    settings,
    bias,
    used,
    masked,
    masks,
    out,
    rows,
    first,
    slot_stride,
    draft_stride,
    row_stride,
    out_stride,
    VOCAB: tl.constexpr,
    PADDED: tl.constexpr,
    WIDEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block of one row; a slot has `rows` of them, and the first sees `first` drafts as history."""
    after_previous()
    block, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, place = line // rows, first + line % rows
    column = block * BLOCK + tl.arange(0, BLOCK)
    known = column < VOCAB
    raw = tl.load(logits + line * row_stride + column, mask=known, other=-_INFINITY).to(tl.float32)
    raw = tl.where(raw == 0, 0.0, raw)  # −0 becomes 0, as in the reference
    target = column  # token ids
    if ids is not None:
        target = tl.load(ids + column, mask=known, other=0)
    logit = raw

    if tl.load(settings + slot * 4) != 0:
        amount = tl.load(bias + slot * PADDED + target, mask=known, other=0.0)
        logit = (logit.to(tl.float64) + amount).to(tl.float32)

    if masks is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(masked + slot * WIDEST + place) != 0:
            words = masks + (slot * WIDEST + place) * (PADDED // _MASK_BITS)
            word = tl.load(words + target // _MASK_BITS, mask=known, other=0)
            logit = tl.where(((word >> (target % _MASK_BITS)) & 1) != 0, logit, -_INFINITY)

    repetition = tl.load(settings + slot * 4 + 1)
    presence = tl.load(settings + slot * 4 + 2)
    frequency = tl.load(settings + slot * 4 + 3)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        uses = tl.load(used + slot * PADDED + target, mask=known, other=0)
        for draft in range(place):
            token = tl.load(drafts + slot * slot_stride + draft * draft_stride)
            uses += tl.where(target == token, _ONCE, 0)
        if tl.max(uses, 0) > 0:  # most blocks hold nothing that was used: spare them a float64 division
            old = logit.to(tl.float64)
            penalised = tl.where(old > 0, old / repetition, old * repetition).to(tl.float32)
            logit = tl.where(uses > 0, penalised, logit)
            count = (uses // _ONCE).to(tl.float64)
            lowered = (logit.to(tl.float64) - (count * frequency + presence)).to(tl.float32)
            logit = tl.where(uses >= _ONCE, lowered, logit)

    # A mask must not hide a logit that is broken: who chooses from these has to see it.
    logit = tl.where(raw < _INFINITY, logit, raw)
    tl.store(out + line * out_stride + column, logit, mask=known)


@triton.jit(do_not_specialize=["width"])
def _remember(chosen, accepted, live, used, width, PADDED: tl.constexpr, WIDEST: tl.constexpr):
    """One slot. Sums of integers: a token that was emitted twice counts twice, in any order."""
    after_previous()
    slot = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, WIDEST)
    emitted = (row < width) & (row <= tl.load(accepted + slot)) & (tl.load(live + slot) != 0)
    token = tl.load(chosen + slot * width + row, mask=emitted, other=0)
    known = emitted & (token >= 0) & (token < PADDED)
    tl.atomic_add(used + slot * PADDED + token, _ONCE, mask=known, sem="relaxed")


def edit_rows(logits: Tensor, vocab: int, tokens: Tensor, tables: EditTables, out: Tensor) -> None:
    """The edited logits of a round into `out`; `logits` stay as they are. The host reads nothing.

    tokens [B, W] int64: the pending token of a slot, which its history holds, and its drafts; logits [B · W, ≥ vocab]:
    row r of a slot sees its first r drafts as history. out [B · W, ≥ vocab] float32: columns from `vocab` on are left
    alone, as `choose_tokens` never looks at them. Logits that are NaN or +∞ stay what they are, whatever forbids them.
    """
    count, width = tokens.shape
    assert len(logits) == count * width and 0 < width <= WIDEST
    _launch(logits, vocab, tokens[:, 1:], 0, tables, None, out, with_masks=True)


def edit_drafts(
    logits: Tensor, vocab: int, drafts: Tensor, drafted: int, tables: EditTables, ids: Tensor | None, out: Tensor
) -> None:
    """The same for a drafter's own logits [B, ≥ vocab], when it has drafted `drafted` tokens after the history.

    drafts [B, ≥ drafted] int64, of any strides; ids [vocab] int64: the target id of each column, for a reduced
    vocabulary. Grammar masks are left out: those that are there belong to the rows of the round before.
    """
    assert len(logits) == len(drafts) and drafted <= drafts.shape[1]
    _launch(logits, vocab, drafts, drafted, tables, ids, out, with_masks=False)


@on_its_device
def _launch(
    logits: Tensor,
    vocab: int,
    drafts: Tensor,
    first: int,
    tables: EditTables,
    ids: Tensor | None,
    out: Tensor,
    with_masks: bool,
) -> None:
    lines, count, padded = len(logits), len(drafts), tables.used.shape[1]
    assert count <= len(tables.used) and vocab <= (padded if ids is None else len(ids))
    assert len(out) == lines and vocab <= min(logits.shape[1], out.shape[1])
    assert logits.stride(1) == out.stride(1) == 1 and out.dtype == torch.float32 and drafts.dtype == torch.int64
    assert ids is None or ids.is_contiguous()
    _edit[(triton.cdiv(vocab, BLOCK), lines)](
        logits,
        ids,
        drafts,
        tables.settings,
        tables.bias,
        tables.used,
        tables.masked if with_masks else None,
        tables.masks if with_masks else None,
        out,
        lines // count,
        first,
        drafts.stride(0),
        drafts.stride(1),
        logits.stride(0),
        out.stride(0),
        VOCAB=vocab,
        PADDED=padded,
        WIDEST=WIDEST,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
        launch_pdl=overlaps(logits.device),
    )


@on_its_device
def remember(chosen: Tensor, accepted: Tensor, live: Tensor, tables: EditTables) -> None:
    """Count the tokens that a round emitted, after `accept`: chosen [B, W] int64 up to and with accepted [B] int32.

    A slot that accepted −1 emitted none, and so did idle ones, where live [B] int32 is 0. The host reads nothing.
    """
    count, width = chosen.shape
    assert count <= len(tables.used) and 0 < width <= WIDEST
    assert chosen.dtype == torch.int64 and accepted.dtype == live.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (chosen, accepted, live))
    _remember[(count,)](
        chosen,
        accepted,
        live,
        tables.used,
        width,
        PADDED=tables.used.shape[1],
        WIDEST=WIDEST,
        num_warps=1,
        launch_pdl=overlaps(chosen.device),
    )
