"""Which arm and how deep: the choice that should give most tokens per second, plain decoding always among them.

Expected tokens come from acceptance observed on this sequence, position by position, with a prior from earlier
requests (`policy/acceptance.py`); expected seconds from rounds measured on this machine (`policy/costs.py`). A losing
arm is tried again rarely, and each time later. All it looks at is known before a draft is made, so that it may decide
under `rejection` too.
"""

from __future__ import annotations

from forerun.draft.arms import ARMS
from forerun.policy.acceptance import Acceptance, Priors
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision, Policy

LEAD = 1.05  # a challenger must promise this much more than the arm in use
SHORT_GAP, FIRST_GAP, LAST_GAP = 2, 16, 384  # rounds between trials of arms that are losing
TRIAL = 3  # drafts in a trial, at most
HOPES = 3  # trials that went well and are soon followed by another
CLEAR, LAST_PLAIN_GAP = 1.3, 64  # plain decoding is measured again while an arm promises less than this, so often
NEAR = 0.9  # of the rate of the arm in use: worth another look soon
ALLOWANCE, SHARE = 0.8, 0.013  # what may be lost to plain decoding: so many rounds and this share of the time
STEADY_ALLOWANCE = 1.2  # such rounds, where the first one of an arm has no drafts yet
STAKE = 0.6  # rounds that one unlucky round may lose beyond that


class Controller(Policy):
    """Decides for one sequence; costs and priors are shared by all sequences of an engine."""

    measures = True

    def __init__(
        self,
        arms: dict[str, int],
        costs: CostTable,
        priors: Priors | None = None,
        kind: str = "",
        plain_first: int = 1,
        steady: bool = False,
    ) -> None:
        """`arms`: name → greatest depth. `steady`: to change arm or depth takes time of its own."""
        self.steady = steady
        self.costs, self.priors, self.kind = costs, priors or Priors(), kind
        self.arms: dict[str, int] = {}
        self.seen: dict[str, Acceptance] = {}
        self.gap: dict[str, int] = {}
        self.waited: dict[str, int] = {}
        self.hopes: dict[str, int] = {}
        self.give(arms)
        self.current = PLAIN
        self.plain_left = plain_first  # rounds of plain decoding at the start: what all else is compared with
        self.trial: str | None = None
        self.limit, self.others = 1, 0
        self.offers: dict[str, int] = {}  # drafts that arms may have now
        self.plain_gap, self.plain_waited = LAST_PLAIN_GAP if steady else 2 * SHORT_GAP, 0
        self.allowance = (STEADY_ALLOWANCE if steady else ALLOWANCE) + self.priors.credit(kind)
        self.saved = 0.0  # seconds gained on plain decoding so far, by its measured cost; negative: lost
        self.spent = 0.0  # seconds in all
        self.shared_gain = 0.0  # seconds gained in rounds that were decided on for a whole batch

    def give(self, arms: dict[str, int]) -> None:
        """What was learned of an arm before it was dropped still counts."""
        self.arms = arms
        for arm in arms:
            self.seen.setdefault(arm, self.priors.acceptance(arm, self.kind))
            self.gap.setdefault(arm, FIRST_GAP)
            self.waited.setdefault(arm, FIRST_GAP - 3)  # a first look at every arm comes early
            self.hopes.setdefault(arm, HOPES)

    def drop(self, drafter: str) -> None:
        """Never choose it again, unless it is given back."""
        for arm in [arm for arm in self.arms if ARMS[arm].drafter == drafter]:
            del self.arms[arm]
        if self.current.drafter == drafter:
            self.current = PLAIN
        if self.trial not in self.arms:
            self.trial = None

    def decide(self, limit: int, available: dict[str, int] | None = None, others: int = 0) -> Decision:
        """The next round, at most `limit` drafts deep, beside `others` sequences.

        `available`: how many drafts each arm may have now; those not in it as many as they like.
        """
        self.limit, self.others, self.offers = limit, others, available or {}
        if limit <= 0 or not self.costs.known or self.plain_left > 0:
            self.plain_left -= 1
            self.trial = None
            return PLAIN
        if self._reserve() < 0:  # in debt
            self.current, self.trial = PLAIN, None
            return PLAIN
        usable = [arm for arm in self.arms if self._most(arm)]
        choices = {None: (self.plain_rate(), PLAIN)} | {arm: self._best(arm) for arm in usable}
        rate, best = max(choices.values(), key=lambda choice: choice[0])
        kept_rate, kept = choices.get(self.current.arm, choices[None])
        self.current = best if rate > LEAD * kept_rate else kept
        if self._plain_is_due(rate / choices[None][0]):
            return PLAIN
        return self._maybe_try({arm: choices[arm][1].depth for arm in usable})

    def plain_rate(self) -> float:
        """Tokens per second of the whole batch when this sequence decodes plainly."""
        rows = 1 + self.others
        return rows / self.costs.pass_seconds(rows, rows)

    def survival(self, decision: Decision) -> list[float]:
        """Tokens that each draft of a round should add; nothing in a trial, which nobody may cut."""
        if decision.arm is None or self.trial is not None:
            return []
        return self.seen[decision.arm].survival(decision.depth)

    def tries(self, decision: Decision) -> bool:
        """Is this a trial of an arm that is not in use?"""
        return self.trial is not None and self.trial == decision.arm

    def seconds_saved(self, tokens: int, seconds: float, plain: float) -> float:  # noqa: ARG002
        """What its ledger says."""
        return self.saved + self.shared_gain

    def _best(self, arm: str) -> tuple[float, Decision]:
        """The depth that gives this arm most tokens per second of the whole batch, of those we can afford to lose."""
        sequences = 1 + self.others
        best, tokens = (0.0, PLAIN), float(sequences)
        kept = self.current if self.steady and arm == self.current.arm else PLAIN
        kept_rate = 0.0
        most = self._reserve() + (1 + STAKE) * self.costs.pass_seconds(sequences, sequences)
        for index, chance in enumerate(self.seen[arm].survival(self._most(arm))):
            depth = index + 1
            tokens += chance
            seconds = self._seconds(arm, depth)
            if seconds > most:
                break
            if depth == kept.depth:
                kept_rate = tokens / seconds
            if tokens > best[0] * seconds:
                best = (tokens / seconds, Decision(arm, depth))
        return (kept_rate, kept) if LEAD * kept_rate > best[0] else best

    def _seconds(self, arm: str, depth: int) -> float:
        """Expected of a round of the whole batch with so many drafts of ours; one call drafts for all who want it."""
        sequences = 1 + self.others
        drafting = self.costs.draft_seconds(ARMS[arm].drafter, depth) / sequences
        return self.costs.pass_seconds(sequences + depth, sequences) + drafting

    def _most(self, arm: str) -> int:
        """Drafts that it may have in the next round."""
        return min(self.limit, self.arms[arm], self.offers.get(arm, self.limit))

    def _reserve(self) -> float:
        """Seconds that may still be lost to plain decoding: what was gained so far, and a little more."""
        return self.saved + SHARE * self.spent + self.allowance * self.costs.pass_seconds(1)

    def _plain_is_due(self, lead: float) -> bool:
        """What all is measured by is measured again now and then, while it could make a difference."""
        self.plain_waited = 0 if self.current.arm is None else self.plain_waited + 1
        if lead > CLEAR or self.plain_waited < self.plain_gap:
            return False
        self.plain_waited, self.plain_gap, self.trial = 0, min(LAST_PLAIN_GAP, 2 * self.plain_gap), None
        return True

    def _is_due(self, arm: str) -> bool:
        """Has it waited long enough, and could it win at all?"""
        if self.waited[arm] < self.gap[arm]:
            return False
        deepest = self._most(arm)
        return (1 + self.others + deepest) / self._seconds(arm, deepest) > self._current_rate()

    def _maybe_try(self, depths: dict[str, int]) -> Decision:
        """Now and then run another arm, not deep, to see whether the text has changed. `depths`: of usable arms."""
        self.trial = None
        for arm in self.arms:
            self.waited[arm] = 0 if arm == self.current.arm else self.waited[arm] + 1
        due = [arm for arm in depths if arm != self.current.arm and self._is_due(arm)]
        if not due:
            return self.current
        arm = max(due, key=lambda name: self.waited[name])
        if not depths[arm]:
            return self.current  # a trial is paid from what is there to lose
        self.waited[arm], self.trial = 0, arm
        return Decision(arm, min(TRIAL, depths[arm]))

    def watch(self, arm: str, drafted: int, accepted: int) -> None:
        """A draft that was not run, compared with the tokens that came: no trial of its arm is needed."""
        if arm in self.seen and drafted:
            self.seen[arm].learn(drafted, accepted)
            self.priors.learn(arm, self.kind, drafted, accepted)
            self.waited[arm] = 0

    def share(self, decision: Decision, drafted: int, accepted: int, gain: float) -> None:
        """A round that was decided on for the whole batch: it is not charged to this sequence, only kept in mind."""
        if decision.arm is not None:
            self.watch(decision.arm, drafted, accepted)
        self.shared_gain += gain

    def learn(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> None:
        """What came of a round that took `seconds` in all."""
        self.spent += seconds
        if self.costs.known:  # rounds of another kind may have been all there was
            gain = self._gain(decision, drafted, accepted, seconds)
            self.saved += gain
            self.priors.earn(self.kind, gain / self.costs.pass_seconds(1))
        arm = decision.arm
        if arm is None or drafted == 0:
            return
        self.seen[arm].learn(drafted, accepted)
        self.priors.learn(arm, self.kind, drafted, accepted)
        if arm == self.trial and self.costs.known:
            # An arm that comes near the one in use is tried again sooner, any other later.
            near = accepted > 0 and self._best(arm)[0] > NEAR * self._current_rate()
            if accepted == drafted and self.hopes[arm]:
                self.hopes[arm] -= 1
                self.gap[arm] = SHORT_GAP  # it might have gone on: find out how far
            else:
                self.gap[arm] = max(2 * SHORT_GAP, self.gap[arm] // 2) if near else min(LAST_GAP, 2 * self.gap[arm])

    def _current_rate(self) -> float:
        return self.plain_rate() if self.current.arm is None else self._best(self.current.arm)[0]

    def _gain(self, decision: Decision, drafted: int, accepted: int, seconds: float) -> float:
        """Seconds gained on plain decoding; in a batch, what the tokens are worth less what our drafts cost."""
        if decision.arm is None:
            return 0.0  # the measure itself
        if not self.others:
            return (1 + accepted) * self.costs.pass_seconds(1) - seconds
        sequences = 1 + self.others
        plain = self.costs.pass_seconds(sequences, sequences)
        return accepted * plain / sequences - (self._seconds(decision.arm, drafted) - plain)
