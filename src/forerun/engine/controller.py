"""Which arm and how deep: the choice that should give most tokens per second, plain decoding always among them.

Expected tokens come from acceptance observed on this sequence, position by position, with a prior from earlier
requests; expected seconds from rounds measured on this machine (`engine/costs.py`). A losing arm is tried again rarely,
and each time later.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.engine.costs import CostTable

SLOW, FAST = 0.95, 0.7  # weight of what is known when a new observation comes in
BREAK = 0.45  # when the fast mean is this far from the slow one, the text has changed: believe the fast one
FADE = 0.97  # weight of what is known of a position after a round that did not reach it
NEIGHBOUR = 3.0  # observations the position before counts for
PRIOR_WEIGHT = 2.0  # observations the prior counts for
LEAD = 1.03  # a challenger must promise this much more than the arm in use
FIRST_GAP, LAST_GAP = 16, 384  # rounds between trials of arms that are losing
TRIAL = 3  # drafts in a trial, at most
NEAR = 0.9  # of the rate of the arm in use: worth another look soon
OPTIMISM = 0.65  # acceptance expected of an arm nobody has seen yet
CONTINUES = 0.97  # acceptance at an unseen position, relative to the one before it
ALLOWANCE, SHARE = 0.8, 0.013  # what may be lost to plain decoding: so many rounds and this share of the time


class Rate:
    """Acceptance at one position, given that all before it were accepted; follows changes of the text."""

    __slots__ = ("_fast", "_hits", "_tries")

    def __init__(self, guess: float, weight: float) -> None:
        self._hits, self._tries, self._fast = weight * guess, weight, guess

    def add(self, hit: bool) -> None:
        """One observation."""
        self._hits = SLOW * self._hits + hit
        self._tries = SLOW * self._tries + 1
        self._fast = FAST * self._fast + (1 - FAST) * hit

    def fade(self) -> None:
        """A round that did not reach this position: what is known grows old."""
        self._hits *= FADE
        self._tries *= FADE

    def own(self) -> float:
        """The expected rate from what was seen here alone."""
        slow = self._hits / self._tries
        return self._fast if abs(self._fast - slow) > BREAK else slow

    def value(self, before: float) -> float:
        """The expected rate; `before`, that of the position before, counts for some observations too."""
        return (self._hits + NEIGHBOUR * before) / (self._tries + NEIGHBOUR)


class Acceptance:
    """One arm on one sequence, position by position."""

    def __init__(self, prior: list[float]) -> None:
        self._rates = [Rate(guess, PRIOR_WEIGHT) for guess in prior or [OPTIMISM]]

    def learn(self, drafted: int, accepted: int) -> None:
        """One round. Positions behind the first rejection were not observed."""
        observed = min(drafted, accepted + 1)
        while len(self._rates) < observed:
            self._rates.append(Rate(OPTIMISM, 0.0))
        for position, rate in enumerate(self._rates):
            if position < observed:
                rate.add(position < accepted)
            else:
                rate.fade()

    def expected(self, depth: int) -> float:
        """Tokens a round of this depth should emit."""
        tokens, survive = 1.0, 1.0
        rate = self._rates[0].own()
        for position in range(depth):
            if position:
                before = CONTINUES * rate
                rate = self._rates[position].value(before) if position < len(self._rates) else before
            survive *= rate
            tokens += survive
        return tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run the next round."""

    arm: str | None
    depth: int


PLAIN = Decision(None, 0)


class Priors:
    """What earlier requests taught about each arm, by kind of request."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def rates(self, arm: str, kind: str) -> list[float]:
        """Expected acceptance per position."""
        counts = self._rates.get((arm, kind), [])
        return [(hits + 2 * OPTIMISM) / (tries + 2) for hits, tries in counts]

    def learn(self, arm: str, kind: str, drafted: int, accepted: int) -> None:
        """One round of any sequence of this kind."""
        counts = self._rates.setdefault((arm, kind), [])
        while len(counts) < drafted:
            counts.append((0.0, 0.0))
        for position in range(min(drafted, accepted + 1)):
            hits, tries = counts[position]
            counts[position] = (0.99 * hits + (position < accepted), 0.99 * tries + 1)


class Controller:
    """Decides for one sequence; costs and priors are shared by all sequences of an engine."""

    def __init__(
        self, arms: dict[str, int], costs: CostTable, priors: Priors | None = None, kind: str = "", plain_first: int = 1
    ) -> None:
        self.arms = arms  # name → greatest depth
        self.costs, self.priors, self.kind = costs, priors or Priors(), kind
        self.seen = {arm: Acceptance(self.priors.rates(arm, kind)) for arm in arms}
        self.current = PLAIN
        self.plain_left = plain_first  # rounds of plain decoding at the start: what all else is compared with
        self.gap = dict.fromkeys(arms, FIRST_GAP)
        self.waited = dict.fromkeys(arms, FIRST_GAP - 3)  # a first look at every arm comes early
        self.trial: str | None = None
        self.limit = 1
        self.saved = 0.0  # seconds gained on plain decoding so far, by its measured cost; negative: lost
        self.spent = 0.0  # seconds in all

    def drop(self, arm: str) -> None:
        """An arm failed: never choose it again."""
        self.arms.pop(arm, None)

    def decide(self, limit: int, available: dict[str, bool] | None = None) -> Decision:
        """The next round, at most `limit` drafts deep. `available`: arms that have something to draft now."""
        if limit <= 0 or not self.costs.known or self.plain_left > 0 or self._in_debt():
            self.plain_left -= 1
            self.trial = None
            return PLAIN
        usable = [arm for arm in self.arms if available is None or available.get(arm, True)]
        self.limit = limit
        best_of = {None: PLAIN} | {arm: self._best(arm) for arm in usable}
        best = max(best_of.values(), key=self.rate)
        kept = best_of.get(self.current.arm, PLAIN)
        self.current = best if self.rate(best) > LEAD * self.rate(kept) else kept
        return self._maybe_try(usable)

    def _best(self, arm: str) -> Decision:
        depths = range(1, min(self.limit, self.arms[arm]) + 1)
        return max((Decision(arm, depth) for depth in depths), key=self.rate)

    def _in_debt(self) -> bool:
        return self.saved < -(SHARE * self.spent + ALLOWANCE * self.costs.pass_seconds(1))

    def rate(self, decision: Decision) -> float:
        """Expected tokens per second."""
        if decision.arm is None:
            return 1 / self.costs.pass_seconds(1)
        return self.seen[decision.arm].expected(decision.depth) / self.seconds(decision)

    def seconds(self, decision: Decision) -> float:
        """Expected seconds of a round."""
        draft = 0.0 if decision.arm is None else self.costs.draft_seconds(decision.arm, decision.depth)
        return self.costs.pass_seconds(1 + decision.depth) + draft

    def _maybe_try(self, usable: list[str]) -> Decision:
        """Now and then run another arm, not deep, to see whether the text has changed."""
        self.trial = None
        for arm in self.arms:
            self.waited[arm] = 0 if arm == self.current.arm else self.waited[arm] + 1
        due = [arm for arm in usable if arm != self.current.arm and self.waited[arm] >= self.gap[arm]]
        if not due:
            return self.current
        arm = max(due, key=lambda name: self.waited[name])
        self.waited[arm], self.trial = 0, arm
        return Decision(arm, min(TRIAL, self._best(arm).depth))

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:
        """What came of a round that took `seconds` in all."""
        self.spent += seconds
        self.saved += (1 + accepted) * self.costs.pass_seconds(1) - seconds
        arm = decision.arm
        if arm is None or drafted == 0:
            return
        self.seen[arm].learn(drafted, accepted)
        self.priors.learn(arm, self.kind, drafted, accepted)
        if arm == self.trial:
            # An arm that comes near the one in use is tried again sooner, any other later.
            near = accepted > 0 and self.rate(self._best(arm)) > NEAR * self.rate(self.current)
            self.gap[arm] = max(4, self.gap[arm] // 2) if near else min(LAST_GAP, 2 * self.gap[arm])
