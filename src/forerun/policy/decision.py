"""A decision, and how deep an arm drafts that the user has named."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.arms import ARMS, MAX_DEPTH


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run the next round of a sequence: an arm by its name, or plain decoding."""

    arm: str | None
    depth: int

    @property
    def drafter(self) -> str | None:
        """Several arms may share a drafter."""
        return None if self.arm is None else ARMS[self.arm].drafter


PLAIN = Decision(None, 0)


class NamedArm:
    """How far to draft with an arm that the user has named: as told, or following what was accepted lately.

    The depth doubles after a round whose drafts were all accepted, and else aims just past what was accepted.
    """

    def __init__(self, arm: str, fixed: int | None = None) -> None:
        """`fixed`: the depth, where the user has named that too."""
        self.arm, self.fixed = ARMS[arm], fixed
        self._depth = self.arm.first_depth

    def decide(self, limit: int) -> Decision:
        """The arm, as deep as it should be, with at most `limit` drafts."""
        depth = min(limit, self._depth if self.fixed is None else self.fixed)
        return Decision(self.arm.name, depth) if depth > 0 else PLAIN

    def learn(self, drafted: int, accepted: int) -> None:
        """What came of a round of this arm."""
        if drafted == 0 or not self.arm.adapts:
            return
        if accepted == drafted:
            self._depth = min(MAX_DEPTH, max(self._depth, 2 * drafted))
        else:
            self._depth = min(MAX_DEPTH, max(2, accepted + 2))
