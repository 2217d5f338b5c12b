"""Rounds of sequences whose answers are constrained: drafts cut to what may follow, a mask for every row.

A draft that breaks a rule is cut before the pass, never asserted. What a constraint raises ends its own sequence.
"""

from __future__ import annotations

from forerun.draft.arms import FORCED
from forerun.draft.protocol import Draft
from forerun.engine.plan import NOTHING, Turn
from forerun.policy.decision import Decision


def force(turn: Turn) -> bool:
    """Draft the only text that may come next. False: a drafter must be asked, alone or too.

    Under rejection sampling who drafts must not depend on what was drawn: whatever is forced is drafted alone.
    """
    sequence, decision = turn.sequence, turn.decision
    if sequence.constraint is None or not decision.depth:
        return False
    try:
        turn.forced = sequence.constraint.forced(decision.depth)
    except Exception as error:  # noqa: BLE001 - it is the sequence's own constraint
        turn.error = error
        return True
    alone = decision.arm == FORCED.name or len(turn.forced) >= decision.depth
    if alone or (turn.forced and sequence.request.accept == "rejection"):
        use_forced(turn)
        return True
    return False


def use_forced(turn: Turn) -> None:
    """The forced tokens are the draft; their record is their own arm's."""
    if turn.forced:
        turn.draft = Draft(turn.forced)
        turn.decision = Decision(FORCED.name, len(turn.forced))


def constrain(turn: Turn) -> None:
    """Cut the drafts of a turn and make the masks of its rows."""
    constraint = turn.sequence.constraint
    if constraint is None or turn.error is not None:
        return
    try:
        legal = constraint.legal(turn.draft.tokens) if turn.draft.tokens else 0
        if legal < len(turn.forced) and turn.draft.tokens != turn.forced:
            use_forced(turn)
            legal = constraint.legal(turn.forced)
        turn.masks = constraint.masks(turn.draft.tokens[:legal])
    except Exception as error:  # noqa: BLE001 - as above
        turn.error = error
        return
    turn.cut = legal < len(turn.draft.tokens)
    # A draft that was drawn from a distribution must be seen to be rejected, else what is drawn instead is biased.
    keeps_one = turn.cut and turn.draft.probabilities is not None
    shorten(turn, legal + keeps_one)


def shorten(turn: Turn, count: int) -> None:
    """Leave the first `count` drafts."""
    tokens, probabilities = turn.draft.tokens[:count], turn.draft.probabilities
    turn.draft = Draft(tokens, None if probabilities is None else probabilities[:count]) if tokens else NOTHING
