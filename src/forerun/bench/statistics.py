"""Medians with intervals: how far a figure would move had other pairs been drawn; figures of ways that take turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
SHARE = 95  # percent of the draws that lie within the interval


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def median(values: Sequence[float]) -> Interval:
    """The median; the interval is a bootstrap over the values."""
    return _bootstrap([values], lambda medians: medians[0])


def geometric_mean(groups: Sequence[Sequence[float]]) -> Interval:
    """The geometric mean of the medians of several groups, each drawn anew on its own."""
    return _bootstrap(groups, lambda medians: np.exp(np.log(medians).mean(axis=0)))


def _bootstrap(
    groups: Sequence[Sequence[float]], combine: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> Interval:
    dice = np.random.default_rng(0)  # the same figures give the same interval
    drawn, actual = [], []
    for values in groups:
        array = np.asarray(values, dtype=np.float64)
        drawn.append(np.median(array[dice.integers(0, len(array), (DRAWS, len(array)))], axis=1))
        actual.append([np.median(array)])
    draws = combine(np.asarray(drawn))
    edge = (100 - SHARE) / 2
    low, high = np.percentile(draws, [edge, 100 - edge])
    return Interval(float(combine(np.asarray(actual))[0]), float(low), float(high))


class Turns:
    """Figures of several ways that take turns: one of each per turn, so that a ratio is between neighbours in time."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def note(self, **figures: float) -> None:
        """What a turn, or a part of one, gave."""
        for name, value in figures.items():
            self.values[name].append(value)

    def median(self, name: str) -> float:
        return median(self.values[name]).value

    def ratio(self, over: str, under: str) -> float:
        """The median of the ratios, turn by turn."""
        return median([a / b for a, b in zip(self.values[over], self.values[under], strict=True)]).value
