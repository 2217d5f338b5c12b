"""The controller in simulated worlds: a clock, drafters with scripted acceptance, and plain decoding to beat."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from forerun.policy.acceptance import Priors
from forerun.policy.controller import Controller
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision

ARMS = {"lookup": 15, "long lookup": 15, "mtp": 8, "model": 8}
DRAFT_COST = {"lookup": 0.005, "long lookup": 0.005, "mtp": 0.1, "model": 0.3}


@dataclass
class World:
    """Costs of passes and drafts, and acceptance of each arm by round and position."""

    slope: float  # seconds per further row; a plain pass takes 1
    draft: dict[str, float]  # seconds per drafted token
    accept: Callable[[str, int, int], float]  # arm, round, position → probability
    noise: float = 0.05
    seed: int = 0
    matches: tuple[float, float, float] = (1.0, 0.0, 0.0)  # how often: a short match, a long one, none

    def run(self, rounds: int, controller: Controller | None = None) -> tuple[float, int, list[Decision]]:
        """Seconds, tokens and decisions."""
        dice = random.Random(self.seed)
        costs = CostTable()
        controller = controller or Controller(dict(ARMS), costs)
        costs = controller.costs
        seconds, tokens, decisions = 0.0, 0, []
        for number in range(rounds):
            # A match is there now and then, and long or short, never both.
            match = dice.choices(["lookup", "long lookup", None], self.matches)[0]
            have = {arm: 15 * (match == arm) for arm in ("lookup", "long lookup")}
            decision = controller.decide(15, have)
            assert decision.arm is None or have.get(decision.arm, True)
            drafted = decision.depth
            accepted = 0
            if decision.arm is not None:
                while accepted < drafted and dice.random() < self.accept(decision.arm, number, accepted):
                    accepted += 1
            draft_seconds = self.draft.get(decision.arm or "", 0.0) * drafted
            pass_seconds = (1 + self.slope * drafted) * (1 + self.noise * dice.random())
            costs.learn(decision.drafter, drafted, 1 + drafted, draft_seconds, pass_seconds)
            controller.learn(decision, drafted, accepted, draft_seconds + pass_seconds)
            if match is not None and decision.drafter != "lookup":  # what the lookup would have said, beside
                right = 0
                while right <= accepted and dice.random() < self.accept(match, number, right):
                    right += 1
                controller.watch(match, 1 + accepted, right)
            seconds += draft_seconds + pass_seconds
            tokens += 1 + accepted
            decisions.append(decision)
        return seconds, tokens, decisions

    def always(self, arm: str) -> bool:
        """Can this arm be used in every round?"""
        return {"lookup": self.matches[0], "long lookup": self.matches[1]}.get(arm, 1.0) == 1.0

    def best_rate(self, number: int = 0) -> tuple[float, str | None]:
        """The best fixed choice, by exact expectation."""
        best: tuple[float, str | None] = (1 / (1 + self.noise / 2), None)
        for arm, most in ARMS.items():
            if not self.always(arm):
                continue
            for depth in range(1, most + 1):
                tokens, survive = 1.0, 1.0
                for position in range(depth):
                    survive *= self.accept(arm, number, position)
                    tokens += survive
                seconds = (1 + self.slope * depth) * (1 + self.noise / 2) + self.draft[arm] * depth
                best = max(best, (tokens / seconds, arm), key=lambda pair: pair[0])
        return best


def random_world(seed: int) -> World:
    """Anything from free wide passes and perfect drafts to costly passes and hopeless drafts, some changing midway."""
    dice = random.Random(seed)
    rates = {arm: [dice.random(), dice.random()] for arm in ARMS}
    turn = dice.choice([50, 100, 10**9])
    return World(
        slope=dice.uniform(0.0, 0.6),
        draft={"lookup": 0.01, "long lookup": 0.01, "mtp": dice.uniform(0.02, 0.3), "model": dice.uniform(0.1, 0.6)},
        accept=lambda arm, number, position: rates[arm][number >= turn] * 0.97**position,
        noise=dice.uniform(0.0, 0.2),
        seed=seed,
        matches=dice.choice([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.4, 0.2, 0.4), (0.2, 0.6, 0.2), (0.0, 0.0, 1.0)]),
    )


def test_never_loses_more_than_three_percent_in_a_thousand_worlds() -> None:
    losses = []
    for seed in range(1000):
        world = random_world(seed)
        seconds, tokens, _ = world.run(200)
        plain = tokens * (1 + world.noise / 2)
        losses.append(seconds / plain - 1)
    assert max(losses) < 0.03, sorted(losses)[-10:]


def scripted(runs: dict[str, int], later: dict[str, int] | None = None, turn: int = 10**9, slope: float = 0.1) -> World:
    """Every draft of an arm is right for so many tokens, and then wrong; from round `turn` on another script."""
    scripts = (runs, later or runs)
    return World(
        slope,
        DRAFT_COST,
        lambda arm, number, position: float(position < scripts[number >= turn].get(arm, 0)),
    )


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        ({"lookup": 8, "mtp": 2}, "lookup"),
        ({"lookup": 0, "mtp": 3}, "mtp"),
        ({"lookup": 1, "mtp": 5}, "mtp"),
        ({"lookup": 0, "mtp": 0}, None),
        ({"lookup": 0, "mtp": 0, "model": 8}, "model"),
    ],
)
def test_converges_to_the_best_arm_within_ten_rounds(runs: dict[str, int], best: str | None) -> None:
    world = scripted(runs)
    assert world.best_rate()[1] == best
    _, _, decisions = world.run(60)
    later = [decision.arm for decision in decisions[10:]]
    assert later.count(best) >= 0.88 * len(later), later  # trials of the others are the rest
    assert best is None or max(decision.depth for decision in decisions[10:30]) >= runs[best]


@pytest.mark.parametrize(("turned", "better"), [("lookup", None), ("mtp", None), ("lookup", "mtp")])
def test_leaves_an_arm_that_turns_bad_within_six_rounds(turned: str, better: str | None) -> None:
    before = {"lookup": 0, "mtp": 0, turned: 6}
    after = {"lookup": 0, "mtp": 0} | ({better: 4} if better else {})
    world = scripted(before | ({better: 1} if better else {}), after, turn=60, slope=0.25)
    _, _, decisions = world.run(100)
    assert [decision.arm for decision in decisions[54:60]].count(turned) >= 5
    used = [decision.arm for decision in decisions[66:]]
    assert used.count(turned) <= 3, used
    if better:
        assert used[12:].count(better) > 0.7 * len(used[12:]), used


def test_comes_back_when_the_text_changes_again() -> None:
    world = scripted({"lookup": 0, "mtp": 0}, {"lookup": 8, "mtp": 0}, turn=40)
    _, _, decisions = world.run(140)
    used = [decision.arm for decision in decisions[110:]]
    assert used.count("lookup") > 0.8 * len(used), used


def test_does_not_flap() -> None:
    """Two arms that are worth about the same: it settles on one."""
    for seed in range(20):
        world = World(0.1, DRAFT_COST, lambda arm, number, position: {"lookup": 0.5, "mtp": 0.72, "model": 0.1}[arm])
        controller = Controller(dict(ARMS), CostTable())
        arms = []
        for number in range(200):
            world.seed = 1000 * seed + number
            world.run(1, controller)
            arms.append(controller.current.arm)
        changes = sum(a != b for a, b in itertools.pairwise(arms))
        assert changes <= 20, (seed, changes)


def test_good_worlds_are_used() -> None:
    """Over random worlds it gets most of what the best fixed choice would get."""
    shares = []
    for seed in range(200):
        world = random_world(seed)
        if world.best_rate()[0] < 1.3 or world.best_rate(10**6)[0] != world.best_rate()[0]:
            continue
        seconds, tokens, _ = world.run(200)
        shares.append(tokens / seconds / world.best_rate()[0])
    assert len(shares) > 20
    assert sum(shares) / len(shares) > 0.93, sum(shares) / len(shares)


def test_a_long_match_overrides_the_head() -> None:
    """The head is good, long matches are better and come every other round: both are used, each where it is best."""
    world = scripted({"mtp": 3, "long lookup": 12, "lookup": 0})
    world.matches = (0.25, 0.5, 0.25)
    _, _, decisions = world.run(200)
    used = [decision.arm for decision in decisions[20:]]
    assert 0.4 < used.count("long lookup") / len(used) < 0.6 and used.count("mtp") > 0.3 * len(used), used
    assert used.count("lookup") < 0.1 * len(used)


def test_short_answers_do_not_pay_for_looking_around() -> None:
    """Where no arm is any good, the first twenty rounds together lose little more than one round."""
    for seed in range(50):
        world = World(0.2, DRAFT_COST, lambda arm, number, position: 0.1, seed=seed)
        seconds, tokens, _ = world.run(20)
        assert seconds < (tokens + 1.4) * (1 + world.noise)


def test_a_drafter_that_fails_takes_its_arms_along() -> None:
    controller = Controller(dict(ARMS), CostTable())
    controller.drop("lookup")
    assert set(controller.arms) == {"mtp", "model"}


def test_a_prior_is_of_its_kind() -> None:
    priors = Priors()
    for _ in range(50):
        priors.learn("lookup", "given text", 4, 4)
        priors.learn("lookup", "short", 4, 0)
    assert priors.rates("lookup", "given text")[0] > 0.9
    assert priors.rates("lookup", "short")[0] < 0.2
    assert 0.3 < priors.rates("lookup", "code")[0] < 0.7  # never seen: what all kinds together say
    assert len(priors.rates("mtp", "short")) == 1  # a guess at its first draft


def test_in_a_batch_drafts_must_pay_for_the_whole_pass() -> None:
    """Rows that are cheap beside one sequence may be dear beside eight."""
    costs = CostTable()
    for rows in 50 * [1, 2, 4, 8]:
        costs.learn(None, 0, rows, 0.0, 1.0)
        costs.learn(None, 0, 8 * rows, 0.0, 0.2 * 8 * rows, sequences=8)
    controller = Controller({"mtp": 4}, costs, plain_first=0)
    controller.decide(4)
    assert controller.current.arm == "mtp"
    controller.decide(4, others=7)
    assert controller.current.arm is None


def test_a_round_may_be_learned_before_any_cost_is_known() -> None:
    """A device may have left all rounds so far to the general way, which has its own table."""
    policy = Controller({"mtp": 3}, CostTable())
    policy.learn(Decision("mtp", 2), 2, 1, 0.1)
    policy.learn(PLAIN, 0, 0, 0.1)
    assert policy.decide(3) == PLAIN


def test_where_changes_cost_time_they_are_few() -> None:
    """The same text, one controller that must not mind and one that must: it is as fast, and changes far less often."""
    changes, rates = [], []
    for steady in (False, True):
        world = World(0.01, {"mtp": 0.05}, lambda arm, number, position: 0.6, seed=3)
        seconds, tokens, decisions = world.run(400, Controller({"mtp": 6}, CostTable(), steady=steady))
        changes.append(sum(one != other for one, other in itertools.pairwise(decisions)))
        rates.append(tokens / seconds)
    assert changes[1] < changes[0] / 3 and rates[1] > 0.97 * rates[0], (changes, rates)


def test_in_debt_no_arm_is_in_use() -> None:
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, 1.0)
    controller = Controller({"mtp": 3}, costs, plain_first=0)
    assert controller.decide(3).arm == "mtp" == controller.current.arm
    controller.learn(controller.current, 3, 0, 9.0)
    assert controller.decide(3) == PLAIN == controller.current


def test_an_arm_is_run_as_deep_as_it_has_drafts() -> None:
    """Forced text of a grammar is often one token long: deciding by a depth it does not have would overrate it."""
    costs, dice = CostTable(), random.Random(3)
    controller, depths = Controller({"grammar": 15, "mtp": 6}, costs), []
    for _ in range(200):
        forced = dice.choice([0, 0, 1, 2, 9])
        decision = controller.decide(15, {"grammar": forced})
        if decision.arm == "grammar":
            assert decision.depth <= forced
            depths.append(decision.depth)
        accepted = decision.depth if decision.arm == "grammar" else 0
        drafting = 0.3 * decision.depth if decision.arm == "mtp" else 0.0
        costs.learn(decision.drafter, decision.depth, 1 + decision.depth, drafting, 1 + 0.1 * decision.depth)
        controller.learn(decision, decision.depth, accepted, drafting + 1 + 0.1 * decision.depth)
    assert max(depths) == 9 and len(depths) > 60, depths
