"""How often the target says each id, and the order in which a draft vocabulary takes ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.train.generate import AnsweredPrompt


def token_frequency(answers: Sequence[AnsweredPrompt], vocab: int) -> Tensor:
    """How often each id occurs in the answers."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for start in range(0, len(answers), 4096):
        some = [token for answer in answers[start : start + 4096] for token in answer.answer]
        counts += torch.bincount(torch.tensor(some, dtype=torch.int64), minlength=vocab)
    return counts


def vocabulary_order(frequency: Tensor, first: Tensor | None = None) -> Tensor:
    """All ids, the most frequent first; those of `first`, when given, before all others."""
    order = frequency.argsort(descending=True, stable=True)
    if first is None:
        return order
    inside = torch.zeros(len(order), dtype=torch.bool, device=order.device)
    inside[first.to(order.device)] = True
    return torch.cat((order[inside[order]], order[~inside[order]]))
