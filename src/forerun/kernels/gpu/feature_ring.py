"""Features of rounds that the head does not read at once: put by in a ring, one row for each lane and round."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.gpu.guard import on_its_device
from forerun.kernels.gpu.overlap import after_previous, overlaps

BLOCK = 1024  # features a program moves


@triton.jit
def _keep(
    features,
    token,
    before,
    accepted,
    kept,
    tokens,
    behind,
    drafted,
    SIZE: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of the features of one lane; the first program of a lane does the rest."""
    after_previous()
    lane, block = tl.program_id(0), tl.program_id(1)
    place = lane * RING + tl.load(before + lane) % RING
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    part = tl.load(features + lane * SIZE + column, mask=inside)
    tl.store(kept + place.to(tl.int64) * SIZE + column, part, mask=inside)
    if block == 0:
        tl.store(tokens + place, tl.load(token + lane))
        tl.store(behind + lane, tl.load(behind + lane) + tl.load(accepted + lane) + 1)
        tl.store(drafted + lane, 0)


@on_its_device
def keep(
    features: Tensor,
    token: Tensor,
    before: Tensor,
    accepted: Tensor,
    kept: Tensor,
    tokens: Tensor,
    behind: Tensor,
    drafted: Tensor,
) -> None:
    """Put by features [B, F] of the positions before [B] int32 and the token after each, token [B] int64.

    Position p goes to row p % R of kept [lanes, R, F] and tokens [lanes, R] int64. behind [lanes] int32 grows by the
    rows a lane has kept, accepted [B] int32 + 1: one, or none where it could not decide on its token. drafted [lanes]
    int32 becomes 0: nobody drafts for the next round.
    """
    lanes, size = features.shape
    assert kept.shape[1:] == (tokens.shape[1], size) and kept.dtype == features.dtype
    assert token.dtype == tokens.dtype == torch.int64
    assert all(tensor.dtype == torch.int32 for tensor in (before, accepted, behind, drafted))
    assert all(tensor.is_contiguous() for tensor in (features, token, before, accepted, kept, tokens, behind, drafted))
    _keep[(lanes, triton.cdiv(size, BLOCK))](
        features,
        token,
        before,
        accepted,
        kept,
        tokens,
        behind,
        drafted,
        SIZE=size,
        RING=tokens.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
        launch_pdl=overlaps(features.device),
    )
