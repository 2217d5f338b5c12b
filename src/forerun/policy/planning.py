"""How a batch drafts in a round: by which drafter, how many steps, and how likely a draft must be to get a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

FINE = 8  # sizes of a pass are compared in steps of a row, or of this part of the sequences where there are many


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Each sequence drafts as long as its next draft is accepted with at least the price as chance."""

    drafter: str | None  # the row drafter of the round
    depth: int  # steps that it makes
    price: float  # tokens that a row must be expected to bring
    rate: float  # expected tokens in the time of a plain pass of one sequence
    times: float = 1.0  # that the round should take, in such passes
    tokens: float = 1.0  # expected of the round
    look: bool = False  # at a drafter that is not in use: text drafts do not run beside it


def share_rows(
    chances: Sequence[Sequence[float]],
    sequences: int,
    rows: int,
    times: Callable[[int], float],
    beside: float = 0.0,
    least: int = 0,
    most: int = 1 << 30,
) -> tuple[float, float, float, float, int]:
    """The rows that bring most expected tokens in the time of the whole pass: rate, times, tokens, price, drafts.

    `chances[n]`: for each draft that sequence n could run, the chance that it is accepted with all before it.
    `rows` run anyway, `beside` is the time of all but the pass; `least` and `most`: of the drafts that are run.

    >>> rate, _, _, price, drafts = share_rows([[0.9, 0.8], [0.2, 0.1]], 2, 2, lambda rows: 1 + 0.2 * rows)
    >>> drafts, 0.2 < price < 0.8
    (2, True)
    """
    # Within a sequence chances fall, so the best offers of all are the first drafts of each.
    offers = sorted((chance for mine in chances for chance in mine), reverse=True)
    tokens = list(accumulate(offers, initial=float(sequences)))
    step = max(1, sequences // FINE)
    most = max(1, min(most, len(offers)))
    least = min(least, most)
    best, taken = -1.0, least
    for count in range(least, min(most + 1, len(tokens)), step):
        rate = tokens[count] / (times(rows + count) + beside)
        if rate >= best:  # where rows cost nothing they are filled
            best, taken = rate, count
    spent = times(rows + taken) + beside
    after = offers[taken] if taken < len(offers) else 0.0
    if taken:
        price = (offers[taken - 1] + after) / 2
    else:
        price = max(1.01 * after, tokens[0] / spent * (times(rows + step) - times(rows)) / step)
    return tokens[taken] / spent, spent, tokens[taken], price, taken
