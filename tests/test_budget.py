"""Rows of a pass go to the sequences that use them best."""

from __future__ import annotations

import itertools
import random

from forerun.policy.budget import share_rows, share_width


def test_equals_trying_everything() -> None:
    dice = random.Random(0)
    for _ in range(100):
        chances = [list(itertools.accumulate([dice.random() for _ in range(3)], lambda a, b: a * b)) for _ in range(3)]
        slope = dice.uniform(0.02, 0.4)

        def seconds(rows: int, slope: float = slope) -> float:
            return 1 + slope * rows

        def rate(depths: tuple[int, ...], chances: list[list[float]] = chances, seconds=seconds) -> float:  # type: ignore[no-untyped-def]
            tokens = 3 + sum(sum(mine[:depth]) for mine, depth in zip(chances, depths, strict=True))
            return tokens / seconds(3 + sum(depths))

        best = max(rate(depths) for depths in itertools.product(range(4), repeat=3))
        assert rate(tuple(share_rows(chances, 3, seconds))) > best - 1e-9


def test_rows_that_are_paid_for_anyway_are_filled() -> None:
    """A pass of 3 to 8 rows costs the same: six drafts fit, however unlikely."""
    chances = [[0.3, 0.1, 0.01, 0.001], [0.2, 0.1, 0.01, 0.001]]
    assert sum(share_rows(chances, 2, lambda rows: 1.0 if rows <= 2 else 1.1 if rows <= 8 else 3.0)) == 6


def test_nothing_is_drafted_where_rows_cost_what_they_bring() -> None:
    assert share_rows([[0.9, 0.8], [0.9]], 2, lambda rows: float(rows)) == [0, 0]


def test_a_sequence_without_a_wish_gets_nothing() -> None:
    assert share_rows([[], [0.9]], 2, lambda rows: 1.0) == [0, 1]


def test_on_a_device_all_pay_for_the_widest() -> None:
    eager, hopeless = [0.95, 0.9, 0.85], [0.05, 0.0, 0.0]

    def dear(width: int) -> float:
        return 1 + 0.5 * width

    assert share_width([eager] * 4, 0, lambda width: 1.0) == 3
    assert share_width([eager] * 4, 0, dear) == 3
    assert share_width([eager] + [hopeless] * 3, 0, dear) == 0, "one that drafts well does not make up for three"
    assert share_width([eager] + [hopeless] * 3, 2, dear) == 2, "somebody asked for two"
    assert share_width([[], []], 1, dear) == 1
