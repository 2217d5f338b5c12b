"""What rounds cost on this machine, learned while running.

The cost of a round is a sum of figures: the pass by its rows, each step of drafting, following, waiting for the
device. Figures are multiples of a plain pass of one sequence; between runs only they are kept. How long such a pass
takes now, the level, follows every round. Figures change where two neighbouring rounds of different shape are
compared: whatever makes the machine slow for a while makes both slow, so it moves the level and blames no arm. Of a
surprise each figure takes a share by how uncertain it is, as a Kalman filter with a diagonal covariance does.

A device measures its own time and has the same speed all day. There the level stays where it is, and every round
corrects the figures that it is the sum of, rows of prompts among them: in a busy batch nearly every round has some.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.draft.arms import SERVED

Key = tuple[str, int, int]  # what of a round, its size class, its rows

FIRST_SLOPE = 0.08  # of a plain pass per further row, until wider passes were measured
# Relative errors of a pass that is read off between two known ones, beyond them, and from other sizes of batch.
BETWEEN, BEYOND, ELSEWHERE = 0.1, 0.2, 1.5
YOUNG = 3  # measurements of a figure that all count; later ones only where the shape of rounds changes
GUESSED = 1.0  # relative error of any other figure before it was measured: it may well be twice or nothing
REMEMBERED = 0.1  # relative error of a figure from an earlier run
STALE = 0.05  # of a round: error of a figure that was not compared for long
STEADY = 0.002  # of a round, by which a figure of a steady machine may be another one from one round to the next
DRIFT = 0.01  # relative change of the machine's speed, and of a figure, from one measurement to the next
FIRST_NOISE, LEAST_NOISE = 0.05, 0.005  # relative scatter of equal rounds, until measured, and at least
NOISE_WEIGHT = 0.05  # of a new observation of it
SURPRISE = 3.0  # standard deviations beyond which a measurement is believed only if the next one agrees
LEAST = 1e-4  # of a plain pass: a figure below it was hidden by noise
FOLLOWING = 0.3  # of a step of drafting: a first guess at what following costs in a round
WAITING = 0.1  # of a plain pass: a first guess at what it costs to know the tokens before planning
PROMPT_ROWS, READING = 64, 0.2  # of a plain pass: a first guess at what so many rows of prompts add to a pass


@dataclass(slots=True)
class Figure:
    """A multiple of a plain pass of one sequence."""

    value: float
    variance: float
    measured: int = 0
    corrected: int = 0  # the round in which it was last compared
    remembered: bool = False  # from an earlier run


@dataclass(frozen=True, slots=True)
class Proportions:
    """Figures as they are kept: of passes by (size class, rows), of all else by name and size class."""

    passes: dict[tuple[int, int], float] = field(default_factory=dict)
    others: dict[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundShape:
    """All that the cost of a round depends on."""

    sequences: int
    rows: int  # of sequences that decode: one for each, and one for each draft
    drafts: tuple[tuple[str, int, int], ...] = ()  # drafter, its deepest draft, sequences that it drafted for
    follows: frozenset[str] = frozenset()  # drafters that followed
    waited: bool = False  # the tokens of the round before had to be known before this one was planned
    prompt_rows: int = 0  # rows of prompts in the same pass


def batch_class(sequences: int) -> int:
    """Batches of about the same size share their measurements: 1, 2, 3–4, 5–8 …"""
    return 1 << (sequences - 1).bit_length()


def knots(rows: int) -> tuple[int, int]:
    """The nearest sizes of a pass, down and up, that have a figure: 1, 2, 3, 4, 6, 8, 12, 16, 24 …

    >>> [knots(rows) for rows in (1, 4, 5, 64, 65, 100)]
    [(1, 1), (4, 4), (4, 6), (64, 64), (64, 96), (96, 128)]
    """
    whole = 1 << (rows.bit_length() - 1)
    half = whole + whole // 2
    if rows in (whole, half):
        return rows, rows
    return (whole, half) if rows < half else (half, 2 * whole)


def steps(drafter: str, depth: int) -> int:
    """Small passes that a drafter runs for drafts of this depth."""
    return 1 if SERVED[drafter][0].at_once else depth


class CostTable:
    """Figures of passes and of everything beside them. Gaps between passes are filled by straight lines."""

    def __init__(self, earlier: Proportions | None = None) -> None:
        self._earlier = earlier
        self.steady = False  # does the machine always have the same speed? So that a device's own times have no level
        self.start_over()

    @property
    def remembers(self) -> bool:
        """Are there figures from an earlier run?"""
        return self._earlier is not None

    def start_over(self) -> None:
        """Forget what was measured in this run."""
        earlier = self._earlier or Proportions()
        self._figures: dict[Key, Figure] = {}
        self._widest: dict[int, int] = {}  # rows that were measured, by size class
        for (size, rows), value in plausible(earlier.passes).items():
            self._figures["pass", size, rows] = Figure(value, (REMEMBERED * value) ** 2, remembered=True)
            self._widest[size] = max(self._widest.get(size, 0), rows)
        for (name, size), value in earlier.others.items():
            self._figures[name, size, 0] = Figure(value, (REMEMBERED * value) ** 2, remembered=True)
        self._figures["pass", 1, 1] = Figure(1.0, 0.0)  # by definition
        self._level = -math.inf  # logarithm of the seconds of a plain pass now
        self._level_variance = 0.0
        self._noise = FIRST_NOISE**2
        self._measured = 0  # rounds
        self._last: tuple[dict[Key, float], float] | None = None  # of the round before: its shape and log seconds
        self._usual: RoundShape | None = None  # of the round before, where another such round says nothing of figures,
        self._expected = 0.0  # and the logarithm of the plain passes that it should take
        self._surprise = 0.0  # of the round before, where it was too large to be believed
        self._doubt = 0.0  # by how much the level has jumped since drafts came or went
        self._drafted = False  # the round before had drafts
        self._lines: dict[int, tuple[list[int], list[float]]] = {}  # since a pass was measured
        self._known: dict[tuple[int, int], float] = {}

    @property
    def known(self) -> bool:
        """Has any round been measured?"""
        return self._measured > 0

    @property
    def second(self) -> float:
        """How many plain passes of one sequence a second has now."""
        return math.exp(-self._level)

    @property
    def in_doubt(self) -> bool:
        """Would a round of another shape tell whether the machine has changed?"""
        return self._doubt != 0.0

    @property
    def noise(self) -> float:
        """Relative scatter of equal rounds."""
        return math.sqrt(self._noise)

    # What is expected.

    def pass_times(self, rows: int, sequences: int = 1) -> float:
        """Of a target pass."""
        key = (batch_class(sequences), rows)
        times = self._known.get(key)
        if times is None:
            times = self._known[key] = sum(self._figure(knot).value * share for knot, share in _pass(*key))
        return times

    def pass_seconds(self, rows: int, sequences: int = 1) -> float:
        """Expected seconds of a target pass now."""
        assert self.known, "at least one round must have been measured"
        return self.pass_times(rows, sequences) / self.second

    def step_times(self, drafter: str, sequences: int) -> float:
        """Of one step of drafting for so many sequences."""
        return self._other(f"{drafter} step", sequences).value

    def follow_times(self, drafter: str, sequences: int) -> float:
        """Of following a round of so many sequences."""
        return self._other(f"{drafter} follow", sequences).value

    def follow_error(self, drafter: str, sequences: int) -> float:
        """By how much that may be wrong."""
        return math.sqrt(self._other(f"{drafter} follow", sequences).variance)

    def wait_times(self, sequences: int) -> float:
        """Of knowing the tokens of a round before the next one is planned."""
        return self._other("wait", sequences).value

    def prompt_times(self, rows: int) -> float:
        """Of rows of prompts beside generated ones."""
        return self._other("prompt", 1).value * rows / PROMPT_ROWS

    def times(self, shape: RoundShape) -> float:
        """Of a whole round."""
        return sum(self._figure(key).value * count for key, count in self._parts(shape).items())

    def widest(self, sequences: int) -> int:
        """Rows of the widest pass of so many sequences that one should dare, by what was measured of wide ones."""
        widest = max(sequences, self._widest.get(batch_class(sequences), 0))
        return widest + max(2, widest // 2)

    # Learning.

    def learn(self, shape: RoundShape, seconds: float, drafting: Mapping[str, float] | None = None) -> None:
        """A round took so long. `drafting`: the part of it that each drafter took, where that is known apart."""
        if shape == self._usual and seconds > 0 and self._learn_usual(seconds):
            return
        self._usual = None
        parts = self._parts(shape)
        for drafter, took in (drafting or {}).items():
            seconds -= took
            for name, _, many in shape.drafts:
                if name == drafter:
                    key: Key = (f"{drafter} step", batch_class(many), 0)
                    self._learn_apart(key, took / parts.pop(key))
        if seconds <= 0:
            return  # a clock too coarse to see it: multiples of nothing would stay nothing
        figures = {key: self._figure(key) for key in parts}
        expected = sum(figures[key].value * count for key, count in parts.items())
        place = math.log(seconds)
        self._measured += 1
        if self._measured <= 2:
            # The first is taken as it comes: the second tells whether there was a pause in it.
            mine = place - math.log(expected)
            self._level = mine if self._measured == 1 else min(self._level, mine)
            self._level_variance = self._noise
            for figure in figures.values():  # nothing tells them from the level
                figure.variance = min(figure.variance, (REMEMBERED * figure.value) ** 2)
        elif self.steady:
            self._fit(parts, figures, expected, seconds * self.second - expected)
        else:
            drafts = bool(shape.drafts) or shape.waited
            self._compare(parts, figures, expected, place - math.log(expected) - self._level, drafts)
            self._drafted = drafts
        if self._last is not None and self._last[0] == parts:
            self._learn_noise(place - self._last[1])
        for figure in figures.values():
            figure.measured += 1
        size = batch_class(shape.sequences)
        self._widest[size] = max(self._widest.get(size, 0), shape.rows)
        self._last = parts, place
        if not self.steady and not shape.drafts and all(figure.measured >= YOUNG for figure in figures.values()):
            self._usual = shape
            self._expected = math.log(sum(figures[key].value * count for key, count in parts.items()))

    def _learn_usual(self, seconds: float) -> bool:
        """As `learn`, for a round of the usual shape: the level alone moves, which is quick. Returns False where the
        round took so much more or less time than expected that `learn` must look at it.
        """
        assert self._last is not None
        place = math.log(seconds)
        surprise, level = place - self._expected - self._level, self._level_variance + DRIFT**2
        spread = level + self._noise
        if abs(surprise) > SURPRISE * math.sqrt(spread):
            return False
        self._measured += 1
        self._surprise = 0.0
        self._level += level / spread * surprise
        self._level_variance = level * (1 - level / spread)
        self._learn_noise(place - self._last[1])
        self._last = self._last[0], place
        return True

    def _learn_noise(self, apart: float) -> None:
        """Two neighbouring rounds of one shape."""
        apart = min(abs(apart), SURPRISE * 2 * self.noise)
        self._noise += NOISE_WEIGHT * (max(LEAST_NOISE**2, apart**2 / 2) - self._noise)

    def _fit(self, parts: dict[Key, float], figures: dict[Key, Figure], expected: float, surprise: float) -> None:
        """Share a surprise, in plain passes, among all that this round was the sum of."""
        while True:
            spread = self._noise * expected**2 + sum(figures[key].variance * count**2 for key, count in parts.items())
            bound = SURPRISE * math.sqrt(spread)
            if abs(surprise) <= bound or not self._unlearn(figures):
                break
        surprise = min(max(surprise, -bound), bound)
        for key, count in parts.items():
            figure = figures[key]
            figure.variance += (STEADY * expected) ** 2
            self._correct(key, figure, figure.variance * count / spread, surprise, count)

    def _compare(
        self, parts: dict[Key, float], figures: dict[Key, Figure], expected: float, surprise: float, drafts: bool
    ) -> None:
        """Share a surprise among the level and the figures in which this round differs from the one before."""
        change = {key: count / expected for key, count in parts.items()}
        if self._last is not None:
            before = self._last[0]
            if before == parts:
                change = {key: by for key, by in change.items() if figures[key].measured < YOUNG}
            else:
                whole = sum(self._figure(key).value * count for key, count in before.items())
                for key, count in before.items():
                    change[key] = change.get(key, 0.0) - count / whole
        touched = [(key, figures.get(key) or self._figure(key), by) for key, by in change.items()]
        for _, figure, _ in touched:
            if 0 < figure.variance < (STALE * expected) ** 2:
                grown = figure.variance + (self._measured - figure.corrected) * (DRIFT * expected) ** 2
                figure.variance = min(grown, (STALE * expected) ** 2)
            figure.corrected = self._measured
        level = self._level_variance + DRIFT**2
        while True:
            spread = level + self._noise + sum(figure.variance * by * by for _, figure, by in touched)
            bound = SURPRISE * math.sqrt(spread)
            if abs(surprise) <= bound or not self._unlearn(figures):
                break
        if drafts != self._drafted and self._resolve(touched, surprise):
            return
        if abs(surprise) > bound:
            if self._surprise * surprise > 0:  # two in a row
                self._change(min(surprise, self._surprise, key=abs))
                return
            self._surprise = surprise
            surprise = math.copysign(bound, surprise)
        else:
            self._surprise = 0.0
        self._level += level / spread * surprise
        self._level_variance = level * (1 - level / spread)
        self._blame(touched, surprise, spread)

    def _unlearn(self, figures: Mapping[Key, Figure]) -> bool:
        """A round contradicts these figures: those from an earlier run that were never measured in this one count as
        guesses from now on, and all other passes of that run are forgotten. Returns whether there were any.
        """
        wrong = [figure for figure in figures.values() if figure.remembered and not figure.measured]
        for figure in wrong:
            figure.remembered, figure.variance = False, (GUESSED * figure.value) ** 2
        for key, figure in list(self._figures.items()) if wrong else ():
            if key[0] == "pass" and figure.remembered and not figure.measured:
                del self._figures[key]
                self._lines.clear()
                self._known.clear()
        return bool(wrong)

    def _change(self, surprise: float) -> None:
        """Two rounds agree on something that cannot be noise: the machine is slower or faster now.

        Or rounds of this shape cost something else than was known. The next change of shape tells.
        """
        self._level, self._level_variance = self._level + surprise, self._noise
        self._surprise, self._doubt = 0.0, self._doubt + surprise

    def _resolve(self, change: list[tuple[Key, Figure, float]], surprise: float) -> bool:
        """Was it the shape? Then the level is back where it was as soon as drafts come or go."""
        doubt, self._doubt = self._doubt, 0.0
        if not doubt or abs(surprise + doubt) > abs(doubt) / 2:
            return False
        self._level -= doubt
        self._blame(change, surprise, sum(figure.variance * by * by for _, figure, by in change))
        return True

    def _blame(self, change: list[tuple[Key, Figure, float]], surprise: float, spread: float) -> None:
        """Figures take their shares of a surprise; those of the round before take them with the opposite sign."""
        for key, figure, by in change:
            if figure.variance:
                ahead = math.expm1(surprise) if by > 0 else -math.expm1(-surprise)
                self._correct(key, figure, figure.variance * by / spread, ahead, by)

    def _learn_apart(self, key: Key, seconds: float) -> None:
        """A figure that was measured by itself."""
        figure = self._figure(key)
        figure.measured += 1
        if not self.known:
            return
        surprise = seconds * self.second - figure.value
        spread = figure.variance + max(self._noise, FIRST_NOISE**2) * figure.value**2
        bound = SURPRISE * math.sqrt(spread)
        self._correct(key, figure, figure.variance / spread, min(max(surprise, -bound), bound), 1.0)

    def _correct(self, key: Key, figure: Figure, gain: float, surprise: float, by: float) -> None:
        figure.value = max(LEAST, figure.value + gain * surprise)
        drift = 0.0 if self.steady else DRIFT * figure.value
        figure.variance = max(0.0, figure.variance * (1 - gain * by)) + drift**2
        if key[0] == "pass":
            self._lines.clear()
            self._known.clear()

    # Figures.

    def _parts(self, shape: RoundShape) -> dict[Key, float]:
        """Which figures a round is the sum of, and how often it has each."""
        size = batch_class(shape.sequences)
        parts: dict[Key, float] = dict(_pass(size, shape.rows))
        for drafter, depth, many in shape.drafts:
            parts[f"{drafter} step", batch_class(many), 0] = float(steps(drafter, depth))
        for drafter in shape.follows:
            parts[f"{drafter} follow", size, 0] = 1.0
        if shape.waited:
            parts["wait", size, 0] = 1.0
        if shape.prompt_rows:
            parts["prompt", 1, 0] = shape.prompt_rows / PROMPT_ROWS
        return parts

    def _figure(self, key: Key) -> Figure:
        figure = self._figures.get(key)
        if figure is not None:
            return figure
        name, size, rows = key
        if name != "pass":
            return self._other(name, size)
        value, error = self._read_off(size, rows)
        figure = self._figures[key] = Figure(value, (error * value) ** 2)
        self._lines.clear()
        return figure

    def _other(self, name: str, sequences: int) -> Figure:
        """Beside the pass. Of a size that was never seen, the same part of a plain pass as of the nearest one."""
        size = batch_class(sequences)
        key: Key = (name, size, 0)
        figure = self._figures.get(key)
        if figure is None:
            sizes = [of for other, of, _ in self._figures if other == name]
            near = min(sizes, key=lambda of: abs(math.log(of / size)), default=0)
            part = self._figures[name, near, 0].value / self.pass_times(near, near) if near else guess(name)
            value = part * self.pass_times(size, size)
            figure = Figure(value, (GUESSED * value) ** 2)
            if self._settled(size):
                self._figures[key] = figure
        return figure

    def _settled(self, size: int) -> bool:
        """Is a plain pass of this size known, which guesses are parts of?"""
        return any(figure.measured for (name, of, _), figure in self._figures.items() if name == "pass" and of == size)

    def _read_off(self, size: int, rows: int) -> tuple[float, float]:
        """A pass that was never measured, and its relative error: from others of this size or, failing that, of any."""
        own, near = self._line(size), self._nearest_line(size)
        if not own[0]:
            return _on_line(near, rows), ELSEWHERE
        if own[0][0] <= rows <= own[0][-1]:
            return _on_line(own, rows), BETWEEN
        if len(own[0]) > 1 and rows > own[0][-1]:
            return _on_line(own, rows), BEYOND
        return own[1][0] * _on_line(near, rows) / _on_line(near, own[0][0]), BEYOND

    def _nearest_line(self, size: int) -> tuple[list[int], list[float]]:
        """Of the size of batch nearest to this one that has more than one figure; else of all."""
        sizes = {of for name, of, _ in self._figures if name == "pass" and of != size}
        for near in sorted(sizes, key=lambda of: abs(math.log(of / size))):
            if len(self._line(near)[0]) > 1:
                return self._line(near)
        return self._line(0)

    def _line(self, size: int) -> tuple[list[int], list[float]]:
        """Rows, ascending, and multiples of measured passes; size 0: of any size."""
        if size not in self._lines:
            points = {
                rows: figure.value
                for (name, of, rows), figure in self._figures.items()
                if name == "pass" and size in (0, of)
            }
            self._lines[size] = sorted(points), [points[rows] for rows in sorted(points)]
        return self._lines[size]

    def proportions(self) -> Proportions:
        """What to keep for the next run."""
        kept = Proportions()
        for (name, size, rows), figure in self._figures.items():
            if name == "pass":
                kept.passes[size, rows] = figure.value
            elif figure.measured:
                kept.others[name, size] = figure.value
        return kept


def plausible(passes: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Figures of a busy machine put right: a pass costs no more than a wider one, nor than its rows one by one.

    >>> plausible({(1, 2): 2.4, (1, 8): 1.3, (1, 16): 20.0})
    {(1, 16): 16.0, (1, 8): 1.3, (1, 2): 1.3}
    """
    found: dict[tuple[int, int], float] = {}
    least: dict[int, float] = {}  # of the wider ones, by size class
    for (size, rows), value in sorted(passes.items(), reverse=True):
        found[size, rows] = least[size] = min(value, float(rows), least.get(size, math.inf))
    return found


def _pass(size: int, rows: int) -> list[tuple[Key, float]]:
    """A pass between two knots costs a share of each."""
    low, high = knots(rows)
    if low == high:
        return [(("pass", size, rows), 1.0)]
    share = (rows - low) / (high - low)
    return [(("pass", size, low), 1 - share), (("pass", size, high), share)]


def _on_line(line: tuple[list[int], list[float]], rows: int) -> float:
    """Between the points of a line, or beyond them."""
    places, values = line
    place = bisect_left(places, rows)
    if place == 0:  # narrower than anything known
        return values[0] * (1 + FIRST_SLOPE * (rows - 1)) / (1 + FIRST_SLOPE * (places[0] - 1))
    low = places[place - 1]
    if place == len(places):  # wider
        slope = (values[-1] - values[0]) / (low - places[0]) if place > 1 else FIRST_SLOPE * values[0] / low
        return values[-1] + max(0.0, slope) * (rows - low)
    share = (rows - low) / (places[place] - low)
    return (1 - share) * values[place - 1] + share * values[place]


def guess(name: str) -> float:
    """A figure beside the pass, before it was measured."""
    if name == "wait":
        return WAITING
    if name == "prompt":
        return READING
    drafter, _, what = name.rpartition(" ")
    arm = SERVED[drafter][0]
    if what == "step":
        return arm.step_cost
    return LEAST if arm.at_once else FOLLOWING * arm.step_cost
