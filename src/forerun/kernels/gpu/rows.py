"""The rows of a round on a GPU: their tokens and positions, which the device alone may know, and features between them.

The host plans which rows there are before it knows what the round under way has given. So it says of a row: this token
at this position; or the pending token of a batch slot, or its n-th draft, so many positions behind what is kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps

BLOCK = 256  # rows of a program
COLUMNS = 1024  # features that a program moves


@triton.jit(do_not_specialize=["rows", "draft_stride"])
def _expand(token, place, owner, pending, position, drafts, tokens, at, rows, draft_stride, BLOCK: tl.constexpr):
    """Some rows."""
    after_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    code = tl.load(token + row, mask=real, other=0)
    slot = tl.load(owner + row, mask=real, other=0)
    stated = tl.load(place + row, mask=real, other=0)
    draft = -2 - code  # its number, where the row holds a draft of the device
    first = tl.load(pending + slot, mask=real & (code == -1), other=0)
    drafted = tl.load(drafts + draft * draft_stride + slot, mask=real & (code < -1), other=0)
    known = tl.where(code >= 0, code.to(tl.int64), tl.where(code == -1, first, drafted))
    kept = tl.load(position + slot, mask=real & (stated < 0), other=0)
    tl.store(tokens + row, known, mask=real)
    tl.store(at + row, tl.where(stated >= 0, stated, kept - 1 - stated), mask=real)


@on_its_device
def expand(
    token: Tensor, place: Tensor, owner: Tensor, pending: Tensor, position: Tensor, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [rows] int64 and positions [rows] int32.

    token [rows] int32: an id; −1: the pending token of its owner; −2 − n: the owner's draft n. place [rows] int32: a
    position; −1 − n: n positions behind those that are kept. owner [rows] int32: batch slots; pending [slots] int64,
    position [slots] int32, drafts [depth, slots] int64.
    """
    rows = len(token)
    tokens = torch.empty(rows, dtype=torch.int64, device=token.device)
    at = torch.empty(rows, dtype=torch.int32, device=token.device)
    _expand[(triton.cdiv(rows, BLOCK),)](
        token, place, owner, pending, position, drafts, tokens, at, rows, drafts.stride(0), BLOCK=BLOCK,
        launch_pdl=overlaps(token.device),
    )  # fmt: skip
    return tokens, at


@triton.jit(do_not_specialize=["stride", "last_stride"])
def _before(features, last, source, owner, out, stride, last_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """A part of one row."""
    after_previous()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    one = tl.load(source + row).to(tl.int64)
    slot = tl.load(owner + row).to(tl.int64)
    mine = tl.load(features + one * stride + column, mask=inside & (one >= 0), other=0.0)
    kept = tl.load(last + slot * last_stride + column, mask=inside & (one < 0), other=0.0)
    tl.store(out + row * SIZE + column, tl.where(one >= 0, mine, kept), mask=inside)


@on_its_device
def features_before(features: Tensor, last: Tensor, source: Tensor, owner: Tensor) -> Tensor:
    """Features [rows, size] of the position before each row: of row `source` of the pass, or where that is negative
    those that were kept of its owner, last [slots, size].
    """
    rows, size = features.shape
    out = torch.empty(rows, size, dtype=features.dtype, device=features.device)
    _before[(rows, triton.cdiv(size, COLUMNS))](
        features, last, source, owner, out, features.stride(0), last.stride(0), SIZE=size, COLUMNS=COLUMNS,
        launch_pdl=overlaps(features.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride", "last_stride", "width"])
def _keep_last(
    features, last, wanted, tail, live, accepted, stride, last_stride, width,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A part of one slot."""
    after_previous()
    slot, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(tail + slot).to(tl.int64)
    count = tl.load(accepted + slot)
    if (tl.load(live + slot) != 0) & (count >= 0):
        row = tl.load(wanted + slot * width) + count
    if row >= 0:
        inside = column < SIZE
        mine = tl.load(features + row * stride + column, mask=inside)
        tl.store(last + slot.to(tl.int64) * last_stride + column, mine, mask=inside)


@on_its_device
def keep_last(features: Tensor, last: Tensor, wanted: Tensor, tail: Tensor, live: Tensor, accepted: Tensor) -> None:
    """Into last [slots, size] go the features of the last row that each slot keeps: of a live one the row of its last
    accepted draft, where wanted [slots, width] int64 are the rows of each; of a prompt row `tail`, if not −1.
    """
    slots, width = wanted.shape
    size = features.shape[1]
    _keep_last[(slots, triton.cdiv(size, COLUMNS))](
        features, last, wanted, tail, live, accepted, features.stride(0), last.stride(0), width,
        SIZE=size, COLUMNS=COLUMNS, launch_pdl=overlaps(features.device),
    )  # fmt: skip
