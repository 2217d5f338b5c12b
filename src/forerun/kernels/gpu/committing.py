"""Acceptance and commit on the device: how far each lane's drafts agree with what `choose` gave, and the state after.

The host learns of it from one tensor, when it likes; the next pass can start before that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.choosing import BROKEN
from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps
from forerun.kernels.interface import WIDEST

_BROKEN = tl.constexpr(BROKEN)


@triton.jit(do_not_specialize=["width"])
def _accept(
    tokens,
    chosen,
    bad,
    drafted,
    live,
    position,
    accepted,
    final,
    result,
    limit,
    slot,
    kept,
    parity,
    width,
    WIDEST: tl.constexpr,
):
    """One lane."""
    after_previous()
    lane = tl.program_id(0)
    row = tl.arange(0, WIDEST)
    known = row < width
    picked = tl.load(chosen + lane * width + row, mask=known, other=0)
    broken = tl.load(bad + lane * width + row, mask=known, other=0)
    running = tl.load(live + lane) != 0
    # row i has a draft to check, the token of row i + 1, only if one was drafted
    checked = (row + 1 < width) & (row < tl.load(drafted + lane)) & running
    fed = tl.load(tokens + lane * width + row + 1, mask=checked, other=0)
    count = tl.min(tl.where(checked & (picked == fed), WIDEST, row), 0)
    # A row that gave no token ends the round before it: the draft it was fed is the last token. What is wrong with it
    # is said when it comes first.
    unknown = tl.min(tl.where((broken != 0) & running, row, WIDEST), 0)
    count = tl.minimum(count, unknown - 1)
    at = tl.load(position + lane)
    count = tl.maximum(tl.minimum(count, tl.load(limit + lane) - at - 2), -1)  # the answer may end before
    failed = tl.max(tl.where((row == 0) & running, broken, 0), 0) == _BROKEN
    last = tl.sum(tl.where(row == count, picked, 0), 0)

    tl.store(accepted + lane, count)
    tl.store(final + lane, last, mask=running & (count >= 0))
    line = result + lane * (width + 2)
    tl.store(line + row, picked, mask=known)
    tl.store(line + width, count.to(tl.int64))
    tl.store(line + width + 1, failed.to(tl.int64))
    if running:
        tl.store(position + lane, at + count + 1)
        if slot is not None:
            place = tl.load(slot + lane)
            tl.store(kept + place, count + 1)
            tl.store(parity + place, tl.load(parity + place) ^ 1)


@on_its_device
def accept(
    tokens: Tensor,
    chosen: Tensor,
    bad: Tensor,
    drafted: Tensor,
    live: Tensor,
    position: Tensor,
    accepted: Tensor,
    final: Tensor,
    result: Tensor,
    limit: Tensor,
    slot: Tensor | None = None,
    kept: Tensor | None = None,
    parity: Tensor | None = None,
) -> None:
    """Accept drafts while they equal what `choose` gave, and move every live lane on. The host reads nothing.

    tokens [B, W] int64: the pending token of a lane and W − 1 drafts, of which the first drafted [B] int32 are real;
    chosen [B, W] int64 and bad [B, W] int32 from `choose_tokens`; live [B] int32, 0 for lanes that no sequence uses.
    limit [B] int32: tokens, prompt included, at which the answer of a lane ends, whatever was drafted beyond it.
    Changed: position [B] int32 grows by the rows kept, accepted + 1; kept [slots] int32 at the lane's slot [B] int32
    becomes that number, and parity [slots] int32 flips there. Written: accepted [B] int32; final [B] int64, the token
    that ends the round; result [B, W + 2] int64: chosen, accepted, and whether the first row was broken. A later row
    that is broken or undecided ends the round before it, where plain decoding comes to it next, if at all. A lane
    whose first row is either accepts −1, as does one that has ended: it stays where it is. Idle lanes change nothing.
    """
    lanes, width = tokens.shape
    assert 0 < width <= WIDEST and result.shape == (lanes, width + 2)
    assert tokens.dtype == chosen.dtype == final.dtype == result.dtype == torch.int64
    states = [tensor for tensor in (slot, kept, parity) if tensor is not None]
    assert len(states) in (0, 3)
    integers = [bad, drafted, live, position, accepted, limit, *states]
    assert all(tensor.dtype == torch.int32 for tensor in integers)
    assert all(tensor.is_contiguous() for tensor in (tokens, chosen, final, result, *integers))
    _accept[(lanes,)](
        tokens,
        chosen,
        bad,
        drafted,
        live,
        position,
        accepted,
        final,
        result,
        limit,
        slot,
        kept,
        parity,
        width,
        WIDEST=WIDEST,
        num_warps=1,
        launch_pdl=overlaps(tokens.device),
    )
