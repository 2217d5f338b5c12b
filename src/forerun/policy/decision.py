"""A decision, what every policy that makes decisions has in common, and the one for arms that users name."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.arms import ARMS, MAX_DEPTH


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run the next round: an arm by its name, or plain decoding."""

    arm: str | None
    depth: int

    @property
    def drafter(self) -> str | None:
        """Who drafts: several arms may share a drafter."""
        return None if self.arm is None else ARMS[self.arm].drafter


PLAIN = Decision(None, 0)


class Policy:
    """Decides how one sequence runs its rounds. This one decodes plainly and learns nothing; `DepthPolicy` drafts as
    told, `Controller` decides by measured time.
    """

    measures = False  # does it compare arms? Then it is asked while rounds run, and told what others would have said
    current = PLAIN  # the decision in use, which a trial of another arm returns to

    def decide(self, limit: int, available: dict[str, int] | None = None, others: int = 0) -> Decision:  # noqa: ARG002
        """At most `limit` drafts, beside `others` sequences; `available`: how many each arm may have now."""
        return PLAIN

    def tries(self, decision: Decision) -> bool:  # noqa: ARG002
        """Is this a trial of an arm that is not in use?"""
        return False

    def survival(self, decision: Decision) -> list[float]:  # noqa: ARG002
        """For each draft the tokens it should add; nothing where the depth must stay as decided."""
        return []

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:
        """What came of a round."""

    def share(self, decision: Decision, drafted: int, accepted: int, gain: float) -> None:
        """What came of a round that was decided on for the whole batch; seconds gained on plain decoding."""

    def watch(self, arm: str, drafted: int, accepted: int) -> None:
        """What would have come of a draft that was not run."""

    def drop(self, drafter: str) -> None:
        """A drafter failed, or was left out: do not choose it."""

    def give(self, arms: dict[str, int]) -> None:
        """All arms there are now, with their greatest depths: some may have been dropped before, or be new."""

    def seconds_saved(self, tokens: int, seconds: float, plain: float) -> float:
        """Against plain decoding at `plain` seconds per token: `tokens` tokens took `seconds`."""
        return tokens * plain - seconds


class DepthPolicy(Policy):
    """How far to draft with an arm that the user has named: as told, or following what was accepted lately.

    Doubles the depth after a round whose drafts were all accepted, else aims just past what was accepted.
    """

    def __init__(self, arm: str | None, fixed: int | None) -> None:
        self.arm, self.fixed = (None if arm is None else ARMS[arm]), fixed
        self._depth = 0 if self.arm is None else self.arm.first_depth

    def decide(self, limit: int, available: dict[str, int] | None = None, others: int = 0) -> Decision:  # noqa: ARG002
        """The one arm it has, as deep as it thinks best."""
        depth = min(limit, self._depth if self.fixed is None else self.fixed)
        return PLAIN if self.arm is None or depth <= 0 else Decision(self.arm.name, depth)

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:  # noqa: ARG002
        """What came of a round."""
        if drafted == 0 or self.arm is None or not self.arm.adapts or decision.drafter != self.arm.drafter:
            return
        if accepted == drafted:
            self._depth = min(MAX_DEPTH, max(self._depth, 2 * drafted))
        else:
            self._depth = min(MAX_DEPTH, max(2, accepted + 2))

    def drop(self, drafter: str) -> None:
        """Go on with plain decoding."""
        if self.arm is not None and self.arm.drafter == drafter:
            self.arm = None
