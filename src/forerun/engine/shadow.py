"""Lookups that another arm kept from running: what they would have said is compared with what came, for free.

So a lookup needs no trials: its record is kept in rounds of every arm.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.lookup import Lookup
from forerun.draft.protocol import Drafter
from forerun.engine.controller import Controller, lookup_arm
from forerun.engine.round import Turn
from forerun.engine.sequence import Sequence

DEPTH = 8  # tokens to compare; a round seldom emits more unless the lookup itself runs


@dataclass(slots=True)
class Shadow:
    """A lookup that is not part of the round."""

    sequence: Sequence
    policy: Controller
    arm: str
    tokens: list[int]
    start: int  # tokens of the sequence before the round


def foresee(turns: list[Turn], drafters: dict[str, Drafter]) -> list[Shadow]:
    """What the lookup would draft for those who run another arm and have just asked it whether it can."""
    lookup = drafters.get("lookup")
    found: list[Shadow] = []
    if not isinstance(lookup, Lookup):
        return found
    for turn in turns:
        sequence = turn.sequence
        policy = sequence.policy
        if turn.decision.drafter == "lookup" or not isinstance(policy, Controller) or "lookup" not in sequence.told:
            continue
        arm = lookup_arm(lookup.ready(sequence.id))
        if arm is not None:
            tokens = lookup.draft(sequence.id, DEPTH)
            found.append(Shadow(sequence, policy, arm, tokens, len(sequence.tokens)))
    return found


def judge(shadows: list[Shadow]) -> None:
    """Compare with the tokens that came; what lies behind them is not known."""
    for shadow in shadows:
        came = shadow.sequence.tokens[shadow.start :]
        drafted = min(len(came), len(shadow.tokens))
        accepted = 0
        while accepted < drafted and came[accepted] == shadow.tokens[accepted]:
            accepted += 1
        shadow.policy.watch(shadow.arm, drafted, accepted)
