"""What rounds cost on this machine: seconds by rows and by drafter, learned while running."""

from __future__ import annotations

from bisect import bisect_left

FRESH = 0.15  # weight of a new measurement
CLIP = 2.5  # a measurement counts for at most this many times the expected one: the machine was busy, not slow
FIRST_SLOPE = 0.08  # of a plain pass per further row, until wider passes were measured
FIRST_DRAFT = {"lookup": 0.005, "mtp": 0.1, "model": 0.3}  # of a plain pass per step, until measured


class Average:
    """A running mean that forgets, and does not believe in outliers."""

    __slots__ = ("count", "value")

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, measured: float) -> None:
        """Take one measurement in."""
        self.count += 1
        if self.count == 1:
            self.value = measured
            return
        measured = min(measured, CLIP * self.value)
        self.value += max(FRESH, 1 / self.count) * (measured - self.value)


class CostTable:
    """Seconds of a target pass by its rows, and of drafting by arm and depth. Gaps are filled by straight lines."""

    def __init__(self) -> None:
        self._passes: dict[int, Average] = {}
        self._drafts: dict[str, Average] = {}  # seconds per step: one to catch up, one per token

    def learn(self, arm: str | None, depth: int, rows: int, draft_seconds: float, pass_seconds: float) -> None:
        """One round: `depth` tokens were drafted by `arm`, the pass had `rows` rows."""
        self._passes.setdefault(rows, Average()).add(pass_seconds)
        if arm is not None and depth > 0:
            self._drafts.setdefault(arm, Average()).add(draft_seconds / (1 + depth))

    @property
    def known(self) -> bool:
        """Has any pass been measured?"""
        return bool(self._passes)

    def pass_seconds(self, rows: int) -> float:
        """Expected seconds of a pass of `rows` rows."""
        known = sorted(self._passes)
        assert known, "at least one pass must have been measured"
        place = bisect_left(known, rows)
        if place < len(known) and known[place] == rows:
            return self._passes[rows].value
        if place == 0:  # narrower than anything measured
            least = known[0]
            return self._passes[least].value / (1 + FIRST_SLOPE * (least - rows))
        low = known[place - 1]
        if place == len(known):  # wider than anything measured
            slope = self._slope(known)
            return self._passes[low].value + slope * (rows - low)
        high = known[place]
        share = (rows - low) / (high - low)
        return (1 - share) * self._passes[low].value + share * self._passes[high].value

    def _slope(self, known: list[int]) -> float:
        first, last = known[0], known[-1]
        if len(known) == 1:
            return FIRST_SLOPE * self._passes[first].value / max(1, first)
        return max(0.0, (self._passes[last].value - self._passes[first].value) / (last - first))

    def draft_seconds(self, arm: str, depth: int) -> float:
        """Expected seconds of drafting `depth` tokens."""
        if depth == 0:
            return 0.0
        measured = self._drafts.get(arm)
        step = FIRST_DRAFT.get(arm, 0.2) * self.pass_seconds(1) if measured is None else measured.value
        return step * (1 + depth)

    def to_data(self) -> dict[str, object]:
        """Plain data for a file."""
        return {
            "passes": {str(rows): average.value for rows, average in self._passes.items()},
            "drafts": {arm: average.value for arm, average in self._drafts.items()},
        }

    @classmethod
    def from_data(cls, data: dict[str, dict[str, object]]) -> CostTable:
        """A table learned earlier; its values count as a few measurements and are corrected soon."""
        table = cls()
        for rows, value in data.get("passes", {}).items():
            table._passes[int(rows)] = Average(float(value), 3)  # type: ignore[arg-type]
        for arm, value in data.get("drafts", {}).items():
            table._drafts[arm] = Average(float(value), 3)  # type: ignore[arg-type]
        return table
