"""How far to draft when the user has named the arm: as told, or following what was accepted lately."""

from __future__ import annotations

from typing import Protocol

from forerun.engine.controller import PLAIN, Decision
from forerun.engine.request import MAX_DEPTH

START = 4
# A head is right about as often in one place as in another, and each of its drafts costs a pass: no reason to double.
MTP_DEPTH = 3


class Policy(Protocol):
    """Decides how a sequence runs its next round. `Controller` does so by measured time."""

    def decide(self, limit: int, available: dict[str, bool] | None = None, others: int = 0) -> Decision:
        """At most `limit` drafts, beside `others` sequences; `available`: which arms have something to draft now."""
        ...

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:
        """What came of a round."""
        ...

    def drop(self, drafter: str) -> None:
        """A drafter failed: never choose it again."""
        ...


class DepthPolicy:
    """Doubles the depth after a round whose drafts were all accepted, else aims just past what was accepted."""

    def __init__(self, arm: str | None, fixed: int | None) -> None:
        self.arm = arm
        self.fixed = fixed
        self._depth = MTP_DEPTH if arm == "mtp" else START

    def decide(self, limit: int, available: dict[str, bool] | None = None, others: int = 0) -> Decision:  # noqa: ARG002
        """The one arm it has, as deep as it thinks best."""
        depth = min(limit, self._depth if self.fixed is None else self.fixed)
        return PLAIN if self.arm is None or depth <= 0 else Decision(self.arm, depth)

    def drop(self, drafter: str) -> None:
        """Go on with plain decoding."""
        if self.arm == drafter:
            self.arm = None

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:  # noqa: ARG002
        """What came of a round."""
        if drafted == 0 or self.arm == "mtp":
            return
        if accepted == drafted:
            self._depth = min(MAX_DEPTH, max(self._depth, 2 * drafted))
        else:
            self._depth = min(MAX_DEPTH, max(2, accepted + 2))
