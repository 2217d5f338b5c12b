"""Loss against the target's distribution, over the frequent ids and a sample of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MEASURED_ROWS = 512  # rows whose loss is reported; the gradient is that of all rows
ROWS_AT_ONCE = 16_384


@dataclass(slots=True)
class Support:
    """The ids in the loss; each of the sampled ones stands for `share` ids of its kind."""

    ids: Tensor  # [n]
    matrix: Tensor  # [n, hidden] rows of the output matrix
    log_share: Tensor  # [n] log of how many ids each stands for
    frequent: int  # the first so many ids stand for themselves


@dataclass(slots=True)
class Teacher:
    """What the head should say."""

    chances: Tensor  # [rows, n] each times what its id stands for; rows sum to one
    top: Tensor  # [rows] the likeliest of the ids


def draw_support(output: Tensor, frequent: Tensor, rest: Tensor, others: int, generator: torch.Generator) -> Support:
    """All frequent ids and `others` of the rest."""
    log_share = torch.zeros(len(frequent), device=output.device)
    ids = frequent
    if len(rest) and others:
        count = min(others, len(rest))
        drawn = torch.randint(len(rest), (count,), generator=generator, device=rest.device)
        ids = torch.cat((frequent, rest[drawn]))
        share = math.log(len(rest) / count)
        log_share = torch.cat((log_share, torch.full((count,), share, device=output.device)))
    return Support(ids, output[ids], log_share.to(output.dtype), len(frequent))


@torch.no_grad()
def teacher(hidden: Tensor, whole: Tensor, support: Support, hard: float = 0.0) -> Teacher:
    """The target's probabilities of the ids; `whole` is the log-sum-exp of all its logits.

    `hard`: the share that goes to the likeliest id alone. Greedy drafts are right when the likeliest ids agree, which
    is not the same as distributions that agree on average.
    """
    rows = torch.empty(len(hidden), len(support.ids), dtype=hidden.dtype, device=hidden.device)
    tops = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    wide = support.matrix.float()
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        logits = hidden[some].float() @ wide.T
        logits -= whole[some, None]
        best, tops[some] = logits[:, : support.frequent].max(dim=1)
        chances = logits.exp_()
        # Only an id that outweighs all that is not looked at is surely the target's choice.
        sure = best.exp() > 1 - chances[:, : support.frequent].sum(dim=1)
        chances *= support.log_share.float().exp()
        share = (hard * sure)[:, None]
        chances *= (1 - share) / chances.sum(dim=1, keepdim=True)
        rows[some] = chances.scatter_add_(1, tops[some, None], share)
    return Teacher(rows, tops)


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy of the head's rows [rows, hidden] with the teacher's; matrix and teacher get no gradient.

    The gradient is made in the forward pass, where the probabilities are at hand, so that they need not be kept. The
    value returned is that of the first rows.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, support: Support, chances: Tensor, weights: Tensor, drafts: Tensor
    ) -> Tensor:
        grads = torch.empty_like(rows)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            logits = torch.addmm(support.log_share, rows[some], support.matrix.T)
            drafts[some] = logits[:, : support.frequent].argmax(dim=-1)
            mine = logits.softmax(dim=-1)
            torch.mm(mine.sub_(chances[some]), support.matrix, out=grads[some])
        grads *= weights.to(rows.dtype)[:, None]
        ctx.save_for_backward(grads)
        return _measured(rows, support, chances, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (grads,) = ctx.saved_tensors
        return grads * grad.to(grads.dtype), None, None, None, None


def _measured(rows: Tensor, support: Support, chances: Tensor, weights: Tensor) -> Tensor:
    some = slice(0, MEASURED_ROWS)
    logits = rows[some].float() @ support.matrix.float().T + support.log_share.float()
    each = -(chances[some].float() * logits.log_softmax(dim=-1)).sum(dim=-1)
    share = weights.sum() / weights[some].sum().clamp_min(1e-9)
    return (each * weights[some]).sum() * share


def soft_cross_entropy(rows: Tensor, support: Support, chances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight × cross-entropy; and the ids (by their place in the support) that the rows draft."""
    drafts = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    loss = SoftCrossEntropy.apply(rows, support, chances, weights, drafts)
    assert isinstance(loss, Tensor)
    return loss, drafts
