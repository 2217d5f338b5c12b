"""The arms: every way to draft for a round, and all that is known of it before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.kernels.interface import WIDEST

MAX_DEPTH = WIDEST - 1  # drafts per round


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft. Several arms may share a drafter: then `evidence` tells them apart."""

    name: str
    drafter: str
    deepest: int  # drafts worth thinking about
    first_depth: int  # drafts of a first round, when the user names the arm and no depth
    adapts: bool  # does the depth of a named arm follow what was accepted lately?
    step_cost: float  # of a plain pass for each step of drafting, until it was measured
    at_once: bool  # drafts of any depth take one step
    acceptance: float  # expected of a draft, until one was seen; rounded from lookups and the built-in head
    hint: str  # what to do where its drafter is not loaded
    evidence: int = 1  # of a drafter's `ready`: the least that calls for this arm rather than for another of its arms

    def steps(self, depth: int) -> int:
        """Of drafting so many tokens: one to catch up, one per token."""
        return 1 if self.at_once else 1 + depth


# In the order in which they are preferred where one must be picked unseen. A head is right about as often in one place
# as in another, and each of its drafts costs a pass: no reason for its depth to double.
MTP = Arm(
    "mtp",
    drafter="mtp",
    deepest=6,
    first_depth=3,
    adapts=False,
    step_cost=0.1,
    at_once=False,
    acceptance=0.6,
    hint="give a head with --head FOLDER (forerun train-head makes one)",
)
# An assistant reads the target's keys and values; the same holds for it.
ASSISTANT = replace(
    MTP,
    name="assistant",
    drafter="assistant",
    deepest=8,
    first_depth=4,
    acceptance=0.7,
    hint="name one with --draft-model",
)
MODEL = replace(ASSISTANT, name="model", drafter="model", adapts=True, step_cost=0.3, acceptance=0.6)
LOOKUP = replace(
    MODEL,
    name="lookup",
    drafter="lookup",
    deepest=MAX_DEPTH,
    step_cost=0.02,
    at_once=True,
    acceptance=0.55,
    hint="use --draft off",
)
# A long match is an arm with a record of its own, which overrides what a neural drafter would say.
LONG_LOOKUP = replace(LOOKUP, name="long lookup", acceptance=0.9, evidence=5)
# The only text that a constraint leaves (a key of a JSON schema), as the tokenizer cuts it. No drafter makes it, and
# nobody names it: sequences that are constrained and draft at all have it.
FORCED = replace(LOOKUP, name="grammar", drafter="grammar", step_cost=0.005, acceptance=0.95)
ARMS = {arm.name: arm for arm in (MTP, ASSISTANT, MODEL, LOOKUP, LONG_LOOKUP, FORCED)}
SERVED = {  # by drafter
    drafter: tuple(arm for arm in ARMS.values() if arm.drafter == drafter)
    for drafter in dict.fromkeys(arm.drafter for arm in ARMS.values())
}
DRAFT_CHOICES = ("auto", "off", LOOKUP.drafter, MTP.drafter, ASSISTANT.drafter, MODEL.drafter)


def arm_for(drafter: str, evidence: int) -> Arm | None:
    """The arm that a drafter's `ready` calls for; None when it has nothing to draft."""
    fitting = [arm for arm in SERVED[drafter] if arm.evidence <= evidence]
    return fitting[-1] if fitting else None
