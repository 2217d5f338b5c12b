"""A budget of rows for a pass of many sequences: drafts run where they are most likely to be accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision, Policy


def cut_drafts(wishes: Sequence[tuple[Policy, Decision]], costs: CostTable, uniform: bool = False) -> list[Decision]:
    """The decisions of a batch without drafts that do not pay in it. Depths that users named stay, and so do trials.

    `uniform`: all sequences of a pass have as many rows as the one with most, as on a device.
    """
    if not costs.known:
        return [decision for _, decision in wishes]
    chances = [policy.survival(decision) for policy, decision in wishes]
    fixed = [decision.depth for (_, decision), mine in zip(wishes, chances, strict=True) if not mine]

    def seconds(rows: int) -> float:
        return costs.pass_seconds(rows, len(wishes))

    if uniform:
        depth = share_width(chances, max(fixed, default=0), lambda width: seconds(len(wishes) * width))
        depths = [min(depth, len(mine)) for mine in chances]
    else:
        depths = share_rows(chances, len(wishes) + sum(fixed), seconds)
    return [
        decision if not mine else Decision(decision.arm, depth) if depth else PLAIN
        for (_, decision), mine, depth in zip(wishes, chances, depths, strict=True)
    ]


def share_width(chances: Sequence[Sequence[float]], least: int, seconds: Callable[[int], float]) -> int:
    """The depth, at least `least`, that brings most expected tokens per second when every sequence pays for it.

    >>> share_width([[0.9, 0.8], [0.9, 0.1]], 0, lambda width: 1 + 0.4 * width)
    1
    """
    deepest = max(least, *map(len, chances))
    tokens = [len(chances) + sum(sum(mine[:depth]) for mine in chances) for depth in range(deepest + 1)]
    return max(range(least, deepest + 1), key=lambda depth: tokens[depth] / seconds(1 + depth))


def share_rows(chances: Sequence[Sequence[float]], others: int, seconds: Callable[[int], float]) -> list[int]:
    """How many of its drafts each sequence gets, for most expected tokens per second of the whole pass.

    `chances[n]`: for each draft that sequence n would like to run, the chance that it is accepted with all before it.
    `others`: rows that run anyway. `seconds`: of a pass by its rows; where more rows cost nothing, they are filled.

    >>> share_rows([[0.9, 0.8], [0.2, 0.1]], 2, lambda rows: 1 + 0.2 * rows)
    [2, 0]
    """
    # Within a sequence chances fall, so the best offers of all are the first drafts of each.
    offers = sorted((-chance, place, who) for who, mine in enumerate(chances) for place, chance in enumerate(mine))
    tokens = float(others)
    best, taken = tokens / seconds(others), 0
    for count, (chance, _, _) in enumerate(offers, 1):
        tokens -= chance
        rate = tokens / seconds(others + count)
        if rate >= best:
            best, taken = rate, count
    depths = [0] * len(chances)
    for _, _, who in offers[:taken]:
        depths[who] += 1
    return depths
