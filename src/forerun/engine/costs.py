"""What rounds cost on this machine: seconds by rows, sequences and drafter, learned while running.

Between runs only proportions are kept, as multiples of a plain pass: how fast the machine is today is measured today.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

FRESH = 0.1  # weight of a new measurement
CLIP, LATE_CLIP = 2.5, 1.5  # a measurement counts for at most this many times the expected one: busy is not slow
FEW = 5  # measurements after which the expectation is good
FIRST_SLOPE = 0.08  # of a plain pass per further row, until wider passes were measured
FIRST_DRAFT = {"lookup": 0.005, "mtp": 0.1, "model": 0.3}  # of a plain pass per step, until measured
OTHER_DRAFT = 0.2
REMEMBERED = 3  # measurements that a figure from an earlier run counts for


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
        measured = min(measured, (CLIP if self.count <= FEW else LATE_CLIP) * self.value)
        self.value += max(FRESH, 1 / self.count) * (measured - self.value)


@dataclass(frozen=True, slots=True)
class Proportions:
    """Costs as multiples of a plain pass of one sequence: of passes by (sequences, rows), of draft steps by drafter."""

    passes: dict[tuple[int, int], float] = field(default_factory=dict)
    drafts: dict[str, float] = field(default_factory=dict)


def batch_class(sequences: int) -> int:
    """Batches of about the same size share their measurements: 1, 2, 3–4, 5–8 …"""
    return 1 << (sequences - 1).bit_length()


class CostTable:
    """Seconds of a target pass by its rows, and of drafting by drafter and depth. Gaps are filled by straight lines."""

    def __init__(self, earlier: Proportions | None = None) -> None:
        self._earlier = earlier or Proportions()
        self._passes: dict[tuple[int, int], Average] = {}
        self._drafts: dict[str, Average] = {}  # seconds per step: one to catch up, one per token
        # Since the last measurement: seconds that were asked for, and the points they were read from.
        self._known: dict[tuple[int, int], float] = {}
        self._lines: dict[int, tuple[list[int], list[float]]] = {}

    def learn(
        self, drafter: str | None, depth: int, rows: int, draft_seconds: float, pass_seconds: float, sequences: int = 1
    ) -> None:
        """One round: `depth` tokens were drafted by `drafter`, the pass had `rows` rows of `sequences` sequences."""
        key = (batch_class(sequences), rows)
        if key not in self._passes:
            self._passes[key] = self._started(key)
        self._passes[key].add(pass_seconds)
        if drafter is not None and depth > 0:
            if drafter not in self._drafts:
                # The first draft often has much to catch up with: it starts from the guess and is clipped.
                self._drafts[drafter] = Average(self._draft_step(drafter), 1)
            self._drafts[drafter].add(draft_seconds / (1 + depth))
        self._known.clear()
        self._lines.clear()

    def _started(self, key: tuple[int, int]) -> Average:
        """A first measurement is not believed in either, once there is something to compare it with."""
        if not self.plain_measured:
            return Average()
        return Average(self._read(*key), REMEMBERED if key in self._earlier.passes else 1)

    @property
    def known(self) -> bool:
        """Has any pass been measured?"""
        return bool(self._passes)

    @property
    def plain_measured(self) -> bool:
        """Has plain decoding of one sequence been measured in this run?"""
        return (1, 1) in self._passes

    def pass_seconds(self, rows: int, sequences: int = 1) -> float:
        """Expected seconds of a pass of `rows` rows."""
        key = (batch_class(sequences), rows)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._read(*key)
        return found

    def _read(self, batch: int, rows: int) -> float:
        measured = self._passes.get((batch, rows))
        if measured is not None:
            return measured.value
        assert self._passes, "at least one pass must have been measured"
        if batch not in self._lines:
            points = self._points(batch)
            self._lines[batch] = sorted(points), [points[place] for place in sorted(points)]
        places, seconds = self._lines[batch]
        place = bisect_left(places, rows)
        if place < len(places) and places[place] == rows:
            return seconds[place]
        if place == 0:  # narrower than anything measured
            return seconds[0] / (1 + FIRST_SLOPE * (places[0] - rows))
        low = places[place - 1]
        if place == len(places):  # wider than anything measured
            return seconds[-1] + _slope(places, seconds) * (rows - low)
        share = (rows - low) / (places[place] - low)
        return (1 - share) * seconds[place - 1] + share * seconds[place]

    def _points(self, batch: int) -> dict[int, float]:
        """Seconds by rows: of this size of batch or, where nothing of it is known, of any."""
        mine = {rows: average.value for (size, rows), average in self._passes.items() if size == batch}
        plain = self._passes.get((1, 1))
        if plain is not None:
            earlier = {r: times * plain.value for (size, r), times in self._earlier.passes.items() if size == batch}
            mine = earlier | mine
        if not mine:
            mine = {rows: average.value for (_, rows), average in self._passes.items()}
        return mine

    def draft_seconds(self, drafter: str, depth: int) -> float:
        """Expected seconds of drafting `depth` tokens."""
        return self._draft_step(drafter) * (1 + depth) if depth else 0.0

    def _draft_step(self, drafter: str) -> float:
        measured = self._drafts.get(drafter)
        if measured is not None:
            return measured.value
        times = self._earlier.drafts.get(drafter, FIRST_DRAFT.get(drafter, OTHER_DRAFT))
        return times * self.pass_seconds(1)

    def proportions(self) -> Proportions:
        """What to keep for the next run: what was learned in this one, over what was known before."""
        plain = self._passes.get((1, 1))
        if plain is None or plain.value <= 0:
            return self._earlier
        return Proportions(
            self._earlier.passes | {key: average.value / plain.value for key, average in self._passes.items()},
            self._earlier.drafts | {name: average.value / plain.value for name, average in self._drafts.items()},
        )


def _slope(places: list[int], seconds: list[float]) -> float:
    """Seconds per further row beyond the widest pass known."""
    if len(places) == 1:
        return FIRST_SLOPE * seconds[0] / places[0]
    return max(0.0, (seconds[-1] - seconds[0]) / (places[-1] - places[0]))
