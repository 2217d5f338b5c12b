"""Thinking while a round runs: what to do after it, and what drafts that cost nothing would have said.

A draft that was not run is compared with the tokens that came. So a lookup needs no trials: its record is kept in
rounds of every arm.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.engine.drafters import Drafters
from forerun.engine.plan import Turn
from forerun.engine.sequence import Sequence
from forerun.policy.decision import Decision

DEPTH = 8  # tokens to compare; a round seldom emits more unless the lookup itself runs


@dataclass(slots=True)
class Unrun:
    """A draft that was not part of the round."""

    sequence: Sequence
    arm: str
    tokens: list[int]
    start: int  # tokens of the sequence before the round


class Watch:
    """The drafts that were not run, until the round they were made for is delivered."""

    def __init__(self, drafters: Drafters) -> None:
        self._drafters = drafters
        self._unrun: list[Unrun] = []

    def look(self, turns: list[Turn]) -> None:
        """Ask for them. Who decides by measured time has just been asked whether it can draft."""
        self._unrun = [
            Unrun(sequence, arm, tokens, len(sequence.tokens))
            for turn in turns
            if (sequence := turn.sequence).policy.measures and not turn.shared
            for arm, tokens in self._drafters.peek(sequence, turn.decision.drafter, DEPTH)
        ]

    def expected(self, sequence: Sequence) -> list[int]:
        """What the next tokens are if a draft that was not run is right."""
        return next((unrun.tokens for unrun in self._unrun if unrun.sequence is sequence), [])

    def judge(self) -> None:
        """Compare with the tokens that came; what lies behind them is not known."""
        for unrun in self._unrun:
            came = unrun.sequence.tokens[unrun.start :]
            drafted = min(len(came), len(unrun.tokens))
            accepted = 0
            while accepted < drafted and came[accepted] == unrun.tokens[accepted]:
                accepted += 1
            unrun.sequence.policy.watch(unrun.arm, drafted, accepted)
        self._unrun = []


@dataclass(frozen=True, slots=True)
class Wish:
    """How a sequence should go on after the round under way, if that emits what is expected."""

    sequence: Sequence
    decision: Decision
    expected: list[int]  # the beginning of it counts
    shared: bool = False  # by a decision for the whole batch

    def holds(self, tokens: list[int]) -> bool:
        """Did it?"""
        return all(token == wanted for token, wanted in zip(tokens, self.expected, strict=False))
