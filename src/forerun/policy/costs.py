"""What rounds cost on this machine: seconds by rows, sequences and drafter, learned while running.

A cost is a multiple of what a plain pass of one sequence costs now. When the machine turns slow or fast, any round
tells, and the costs of all arms move together: an arm that was last run in a bad hour is not blamed for it. Between
runs only the multiples are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from forerun.draft.arms import SERVED

FRESH = 0.1  # weight of a new measurement
DRIFT = 0.25  # weight of a round in how the machine's speed differs from when plain decoding was last measured
STEADY = 1.3  # up to this factor it does not: multiples are learned then, and else left alone
CLIP = 2.0  # a measurement counts for at most this many times the expected one: the machine was busy, not slow
FEW = 3  # measurements after which a multiple tells how fast the machine is
FIRST_SLOPE = 0.08  # of a plain pass per further row, until wider passes were measured
LEAST_DRAFT = 1e-4  # a step that looks cheaper than this was not measured, but hidden by noise
REMEMBERED = 4  # measurements that a figure from an earlier run counts for
PLAIN = (1, 1)  # one sequence, one row


class Average:
    """A running mean that forgets, and does not believe in outliers. It starts empty, or from a guess."""

    __slots__ = ("_guessed", "count", "value")

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        """`count`: measurements that the guess counts for."""
        self.value, self.count, self._guessed = value, count, count > 0

    def add(self, measured: float) -> None:
        """Take one measurement in."""
        self.count += 1
        if not self._guessed and self.count <= 2:
            # The first is taken as it comes: the second tells whether there was a pause in it.
            self.value = measured if self.count == 1 else min(self.value, CLIP * measured)
        measured = clipped(measured, self.value)
        self.value += max(FRESH, 1 / self.count) * (measured - self.value)


def clipped(measured: float, expected: float) -> float:
    """Not more than so many times what was expected, nor so much less."""
    return min(max(measured, expected / CLIP), CLIP * expected)


@dataclass(frozen=True, slots=True)
class Proportions:
    """Costs as multiples of a plain pass of one sequence: of passes by (sequences, rows), of draft steps by drafter."""

    passes: dict[tuple[int, int], float] = field(default_factory=dict)
    drafts: dict[str, float] = field(default_factory=dict)


def batch_class(sequences: int) -> int:
    """Batches of about the same size share their measurements: 1, 2, 3–4, 5–8 …"""
    return 1 << (sequences - 1).bit_length()


@dataclass(slots=True)
class RoundTime:
    """What one round of some sequences took."""

    sequences: int
    rows: int
    seconds: float  # of its pass; on a device also of the drafts that were made in it for the next round
    drafter: str | None = None  # who drafted, where that was for one sequence alone
    drafted: int = 0
    drafting: float = 0.0  # seconds before the pass
    inside: tuple[str, int] | None = None  # drafter and depth of the drafts within `seconds`


class CostTable:
    """Seconds of a target pass by its rows, and of drafting by drafter and depth. Gaps are filled by straight lines."""

    def __init__(self, earlier: Proportions | None = None) -> None:
        self._earlier = earlier
        self.start_over()

    @property
    def remembers(self) -> bool:
        """Are there figures from an earlier run?"""
        return self._earlier is not None

    def start_over(self) -> None:
        """Forget what was measured in this run."""
        earlier = self._earlier or Proportions()
        self._plain = Average()  # seconds of a plain pass when last measured, or else guessed from another pass
        self._drift = 1.0  # how many times as long everything takes since
        self._passes = {key: Average(times, REMEMBERED) for key, times in earlier.passes.items()}
        self._passes[PLAIN] = Average(1.0, REMEMBERED)
        self._drafts = {name: Average(times, REMEMBERED) for name, times in earlier.drafts.items()}
        # Since the last measurement: multiples that were asked for, and the points they were read from.
        self._known: dict[tuple[int, int], float] = {}
        self._lines: dict[int, tuple[list[int], list[float]]] = {}

    def learn(
        self, drafter: str | None, depth: int, rows: int, draft_seconds: float, pass_seconds: float, sequences: int = 1
    ) -> None:
        """One round: `depth` tokens were drafted by `drafter`, the pass had `rows` rows of `sequences` sequences."""
        if pass_seconds <= 0:
            return  # a clock too coarse to see it: multiples of nothing would stay nothing
        key = (batch_class(sequences), rows)
        if key == PLAIN:
            self._plain.value = self._now()
            self._plain.add(pass_seconds)
            self._drift = 1.0
        else:
            self._learn_pass(key, pass_seconds)
        if drafter is not None and depth > 0:
            self.learn_draft(drafter, depth, draft_seconds)
        self._known.clear()
        self._lines.clear()

    def learn_round(self, round_time: RoundTime) -> None:
        """One round. Of a pass with drafts for the next one inside, what is known of one tells the other."""
        seconds, sequences, rows = round_time.seconds, round_time.sequences, round_time.rows
        if round_time.inside is not None and self.known:
            drafter, depth = round_time.inside
            if sequences == 1 and rows > 1 and round_time.drafter in (None, drafter):
                self.learn_draft(drafter, depth, seconds - self.pass_seconds(rows))
                return
            seconds -= min(self.draft_seconds(drafter, depth), seconds / 2)
        self.learn(round_time.drafter, round_time.drafted, rows, round_time.drafting, seconds, sequences)

    def learn_draft(self, drafter: str, depth: int, seconds: float) -> None:
        """`depth` tokens took so long to draft."""
        step = max(LEAST_DRAFT, seconds / SERVED[drafter][0].steps(depth) / self._now())
        # The first draft often has much to catch up with: it starts from the guess and is clipped.
        self._drafts.setdefault(drafter, Average(self._draft_times(drafter), 1)).add(step)

    def _learn_pass(self, key: tuple[int, int], seconds: float) -> None:
        times = self._times(*key)
        if not self.known:
            self._plain.value = seconds / times
        average = self._passes.setdefault(key, Average(times, 1))
        if average.count >= FEW:
            self._drift += DRIFT * (clipped(seconds / times / self._plain.value, self._drift) - self._drift)
        if self._steady():
            average.add(seconds / self._plain.value)

    def _steady(self) -> bool:
        return 1 / STEADY < self._drift < STEADY

    def _now(self) -> float:
        """Seconds of a plain pass now. A small drift is noise, or a multiple that is still being learned."""
        return self._plain.value if self._steady() else self._plain.value * self._drift

    @property
    def known(self) -> bool:
        """Has any pass been measured?"""
        return self._plain.value > 0

    @property
    def plain_measured(self) -> bool:
        """Has plain decoding of one sequence been measured in this run?"""
        return self._plain.count > 0

    def pass_seconds(self, rows: int, sequences: int = 1) -> float:
        """Expected seconds of a pass of `rows` rows."""
        assert self.known, "at least one pass must have been measured"
        key = (batch_class(sequences), rows)
        times = self._known.get(key)
        if times is None:
            times = self._known[key] = self._times(*key)
        return self._now() * times

    def _times(self, batch: int, rows: int) -> float:
        measured = self._passes.get((batch, rows))
        if measured is not None:
            return measured.value
        places, values = self._line(batch)
        place = bisect_left(places, rows)
        if place == 0:  # narrower than anything measured
            return values[0] / (1 + FIRST_SLOPE * (places[0] - rows))
        low = places[place - 1]
        if place == len(places):  # wider than anything measured
            slope = (values[-1] - values[0]) / (low - places[0]) if place > 1 else FIRST_SLOPE * values[0] / low
            return values[-1] + max(0.0, slope) * (rows - low)
        share = (rows - low) / (places[place] - low)
        return (1 - share) * values[place - 1] + share * values[place]

    def _line(self, batch: int) -> tuple[list[int], list[float]]:
        """Rows, ascending, and multiples: of this size of batch or, where nothing of it is known, of any."""
        if batch not in self._lines:
            points = {rows: average.value for (size, rows), average in self._passes.items() if size == batch}
            if not points:
                points = {rows: average.value for (_, rows), average in self._passes.items()}
            self._lines[batch] = sorted(points), [points[rows] for rows in sorted(points)]
        return self._lines[batch]

    def draft_seconds(self, drafter: str, depth: int) -> float:
        """Expected seconds of drafting `depth` tokens."""
        return self._now() * self._draft_times(drafter) * SERVED[drafter][0].steps(depth) if depth else 0.0

    def _draft_times(self, drafter: str) -> float:
        measured = self._drafts.get(drafter)
        return SERVED[drafter][0].step_cost if measured is None else measured.value

    def proportions(self) -> Proportions:
        """What to keep for the next run."""
        return Proportions(
            {key: average.value for key, average in self._passes.items()},
            {name: average.value for name, average in self._drafts.items()},
        )
