"""How far to draft when the user has named the arm: as told, or following what was accepted lately."""

from __future__ import annotations

from forerun.draft.arms import ARMS, MAX_DEPTH
from forerun.policy.decision import PLAIN, Decision, Policy


class DepthPolicy(Policy):
    """Doubles the depth after a round whose drafts were all accepted, else aims just past what was accepted."""

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
