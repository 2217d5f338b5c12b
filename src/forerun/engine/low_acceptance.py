"""A drafter that is never right: a mismatched pair above all. Somebody should know, and be told once."""

from __future__ import annotations

import logging

log = logging.getLogger("forerun")

ROUNDS = 200  # with drafts, after which it is time to look
LEAST = 0.02  # of the drafts that must have been accepted by then


class LowAcceptance:
    """Counts the rounds of each drafter, whoever's they are."""

    def __init__(self) -> None:
        self.warnings: list[str] = []  # one for each drafter that was found out
        self._counts: dict[str, list[int]] = {}  # rounds, drafted, accepted since the last look
        self._warned: set[str] = set()

    def note(self, drafter: str, drafted: int, accepted: int) -> None:
        """One round of one sequence that had drafts. Of those that broke a rule of its answer it must not be told."""
        counts = self._counts.setdefault(drafter, [0, 0, 0])
        counts[0] += 1
        counts[1] += drafted
        counts[2] += accepted
        if counts[0] >= ROUNDS:
            self._look(drafter, *counts)
            self._counts[drafter] = [0, 0, 0]

    def _look(self, drafter: str, rounds: int, drafted: int, accepted: int) -> None:
        if accepted >= LEAST * drafted or drafter in self._warned:
            return
        self._warned.add(drafter)
        message = (
            f"drafter {drafter} is almost never right: {accepted} of {drafted} drafts accepted in {rounds} rounds. "
            "It costs time and brings nothing: does it belong to this model?"
        )
        self.warnings.append(message)
        log.warning("%s", message)
