"""How often head and target choose the same token when both add the same Gumbel noise, and its gradient.

With chances p and q the shared noise makes both choose token i with probability 1 / Σ_j max(p_j / p_i, q_j / q_i);
the sum over i is the share of drafts that `coupled` acceptance keeps. Cross-entropy only bounds it: it spends its
effort on rows that no head could get right, this on those that a small step decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIKELIEST = 32  # tokens of the target that are looked at one by one; the others count as one
LEAST = 1e-6  # below this a chance is as good as none, and ratios to it would overflow


@torch.no_grad()
def agreement(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The share [rows] of equal choices, and its gradient [rows, n] by the logarithms of q.

    p and q [rows, n]: chances, of which the last stands for all tokens that are not listed. Choosing an unlisted token
    is never counted as agreement, which makes the share a little too small.
    """
    p, q = p.float().clamp_min(LEAST), q.float().clamp_min(LEAST)
    listed = p.shape[1] - 1
    theirs = p[:, None, :] / p[:, :listed, None]  # [rows, i, j]: p_j / p_i
    mine = q[:, None, :] / q[:, :listed, None]
    total = torch.maximum(theirs, mine).sum(dim=2)
    # Where q's ratio is the greater one, the share falls with q_j and grows with q_i.
    pull = torch.where(mine > theirs, mine, 0.0) / total[:, :, None].square()
    gradient = -pull.sum(dim=1)
    gradient[:, :listed] += pull.sum(dim=2)
    return total.reciprocal().sum(dim=1), gradient
