"""How far to draft in the next round, until measured time decides: follow what was accepted lately."""

from __future__ import annotations

from forerun.engine.request import MAX_DEPTH

START = 4
# A head is right about as often in one place as in another, and each of its drafts costs a pass: no reason to double.
MTP_DEPTH = 3


class DepthPolicy:
    """Doubles the depth after a round whose drafts were all accepted, else aims just past what was accepted."""

    def __init__(self, arm: str | None, fixed: int | None) -> None:
        self.arm = arm
        self.fixed = fixed
        self._depth = MTP_DEPTH if arm == "mtp" else START

    @property
    def depth(self) -> int:
        """Drafts to ask for now; 0 is plain decoding."""
        if self.arm is None:
            return 0
        return self._depth if self.fixed is None else self.fixed

    def learn(self, drafted: int, accepted: int) -> None:
        """What came of a round."""
        if drafted == 0 or self.arm == "mtp":
            return
        if accepted == drafted:
            self._depth = min(MAX_DEPTH, max(self._depth, 2 * drafted))
        else:
            self._depth = min(MAX_DEPTH, max(2, accepted + 2))
