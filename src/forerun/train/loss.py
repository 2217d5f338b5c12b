"""Loss against the target's distribution, over the frequent ids and a sample of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.train.agreement import LEAST, LIKELIEST, agreement

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
    listed: Tensor  # [rows, k] the likeliest ids, by their place in the support; k may be 0
    heated: dict[float, Tensor]  # temperature -> [rows, k + 1] their chances at it, and that of all others

    def at(self, rows: Tensor | slice) -> Teacher:
        """Some of the rows."""
        heated = {heat: chances[rows] for heat, chances in self.heated.items()}
        return Teacher(self.chances[rows], self.top[rows], self.listed[rows], heated)


@dataclass(frozen=True, slots=True)
class Aim:
    """What the head is trained for."""

    hard: float = 0.0  # share of the teacher that is its likeliest id alone
    agree: float = 0.0  # weight of choosing the target's token, beside the cross-entropy ...
    heats: tuple[float, ...] = ()  # ... at these temperatures


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
def teacher(hidden: Tensor, whole: Tensor, support: Support, aim: Aim) -> Teacher:
    """The target's probabilities of the ids; `whole` is the log-sum-exp of all its logits.

    A share may go to the likeliest id alone: greedy drafts are right when the likeliest ids agree, which is not the
    same as distributions that agree on average.
    """
    count = min(LIKELIEST, support.frequent) if aim.agree else 0
    listed = torch.empty(len(hidden), count, dtype=torch.int64, device=hidden.device)
    heated = {heat: torch.empty(len(hidden), count + 1, device=hidden.device) for heat in aim.heats if aim.agree}
    rows = torch.empty(len(hidden), len(support.ids), dtype=hidden.dtype, device=hidden.device)
    tops = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    wide = support.matrix.float()
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        logits = hidden[some].float() @ wide.T
        logits -= whole[some, None]
        best, tops[some] = logits[:, : support.frequent].max(dim=1)
        if aim.agree:
            listed[some] = logits[:, : support.frequent].topk(count, dim=1).indices
            for heat, chances in heated.items():
                chances[some] = listed_chances(logits, support, listed[some], heat)
        chances = logits.exp_()
        # Only an id that outweighs all that is not looked at is surely the target's choice.
        sure = best.exp() > 1 - chances[:, : support.frequent].sum(dim=1)
        chances *= support.log_share.float().exp()
        share = (aim.hard * sure)[:, None]
        chances *= (1 - share) / chances.sum(dim=1, keepdim=True)
        rows[some] = chances.scatter_add_(1, tops[some, None], share)
    return Teacher(rows, tops, listed, heated)


def listed_chances(logits: Tensor, support: Support, listed: Tensor, heat: float) -> Tensor:
    """Chances [rows, k + 1] at a temperature of the ids listed, and of all others together."""
    return _listed(_heated(logits, support, heat), listed)


def _heated(logits: Tensor, support: Support, heat: float) -> Tensor:
    return torch.add(support.log_share, logits, alpha=1 / heat).softmax(dim=1)


def _listed(chances: Tensor, listed: Tensor) -> Tensor:
    few = chances.gather(1, listed).float()
    return torch.cat((few, (1 - few.sum(dim=1, keepdim=True)).clamp_min(0)), dim=1)


class DraftLoss(torch.autograd.Function):
    """Weighted loss of the head's rows [rows, hidden] against the teacher; matrix and teacher get no gradient.

    The gradient is made in the forward pass, where the probabilities are at hand, so that they need not be kept. The
    value returned is the cross-entropy of the first rows.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, support: Support, taught: Teacher, agree: float, weights: Tensor, drafts: Tensor
    ) -> Tensor:
        grads = torch.empty_like(rows)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            logits = rows[some] @ support.matrix.T
            drafts[some] = logits[:, : support.frequent].argmax(dim=-1)
            change = _heated(logits, support, 1.0).sub_(taught.chances[some])
            for heat, chances in taught.heated.items():
                change.sub_(_agreeing(logits, support, taught.listed[some], chances[some], heat), alpha=agree / heat)
            torch.mm(change, support.matrix, out=grads[some])
        grads *= weights.to(rows.dtype)[:, None]
        ctx.save_for_backward(grads)
        return _measured(rows, support, taught.chances, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        (grads,) = ctx.saved_tensors
        return grads * grad.to(grads.dtype), None, None, None, None, None


def _agreeing(logits: Tensor, support: Support, listed: Tensor, theirs: Tensor, heat: float) -> Tensor:
    """By heat × logits [rows, n], the gradient of how often both choose the same id."""
    mine = _heated(logits, support, heat)
    few = _listed(mine, listed)
    _, gradient = agreement(theirs, few)
    others = gradient[:, -1:] / few[:, -1:].clamp_min(LEAST)
    return mine.mul_(others).scatter_(1, listed, gradient[:, :-1].to(mine.dtype))


def _measured(rows: Tensor, support: Support, chances: Tensor, weights: Tensor) -> Tensor:
    some = slice(0, MEASURED_ROWS)
    logits = rows[some].float() @ support.matrix.float().T + support.log_share.float()
    each = -(chances[some].float() * logits.log_softmax(dim=-1)).sum(dim=-1)
    share = weights.sum() / weights[some].sum().clamp_min(1e-9)
    return (each * weights[some]).sum() * share


def draft_loss(rows: Tensor, support: Support, taught: Teacher, agree: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of weight × loss; and the ids (by their place in the support) that the rows draft."""
    drafts = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    loss = DraftLoss.apply(rows, support, taught, agree, weights, drafts)
    assert isinstance(loss, Tensor)
    return loss, drafts
