"""Answers that fall into a loop: found, so that training does not learn them and evaluation counts them apart."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST_PERIOD = 48
REPEATS = 4  # a stretch said this often is a loop ...
SHORTEST = 16  # ... unless it is very short altogether (a row of dashes, "ha ha ha ha")


def loop_starts(tokens: Tensor, lengths: Tensor) -> Tensor:
    """For answers [rows, width] of the given lengths: how many tokens come before it repeats itself, else its length.

    The first two rounds of the loop are kept; what follows is cut.
    """
    rows, width = tokens.shape
    starts = lengths.clone()
    places = torch.arange(width, device=tokens.device)
    for period in range(1, min(LONGEST_PERIOD, width // 2) + 1):
        need = max((REPEATS - 1) * period, SHORTEST)  # equal pairs in a row
        if width - period < need:
            break
        same = tokens[:, period:] == tokens[:, :-period]
        same &= places[period:] < lengths[:, None]
        sums = torch.cat((same.new_zeros(rows, 1, dtype=torch.int32), same.cumsum(1, dtype=torch.int32)), dim=1)
        full = (sums[:, need:] - sums[:, :-need]) == need  # a run of `need` pairs begins here
        found = full.any(dim=1)
        first = full.int().argmax(dim=1) + 2 * period
        starts = torch.where(found, torch.minimum(starts, first), starts)
    return starts


def is_looping(tail: Tensor) -> Tensor:
    """Whether answers [rows, width] end in a loop; the cheap check made while they are written."""
    rows, width = tail.shape
    looping = torch.zeros(rows, dtype=torch.bool, device=tail.device)
    for period in range(1, LONGEST_PERIOD + 1):
        need = max((REPEATS - 1) * period, SHORTEST)
        if need + period > width:
            break
        last = tail[:, width - need - period :]
        looping |= (last[:, period:] == last[:, :-period]).all(dim=1)
    return looping
