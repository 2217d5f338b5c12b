"""The policy on a simulated machine: what it decides, what it follows, what looking costs."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from policy_settings import CPU_HEAD, GOOD_HEAD, GPU, HEAD, LOOKUP, SETTINGS, Setting, steady
from policy_table import measure
from policy_world import Answer, Fixed, Machine, serve

from forerun.draft.arms import ARMS
from forerun.policy.acceptance import Priors
from forerun.policy.costs import CostTable, Proportions, RoundShape
from forerun.policy.decision import PLAIN, Decision, NamedArm
from forerun.policy.planning import share_rows
from forerun.policy.policy import WARM, Policy
from forerun.policy.records import Ask, RoundPart, RoundResult

SHORT = [setting for setting in SETTINGS if not setting.name.startswith("64")]  # the table runs all, with more seeds


@pytest.mark.parametrize("setting", SHORT, ids=lambda setting: setting.name)
def test_never_below_plain_decoding(setting: Setting) -> None:
    found = measure(setting, seeds=1, fixed=False)
    assert found.of_plain > (0.985 if setting.short else 0.99)


@pytest.mark.parametrize("name", ["alone, head wins, GPU", "alone, head wins, short", "4, head wins, GPU"])
def test_near_the_best_fixed_arm_where_one_wins(name: str) -> None:
    (setting,) = [one for one in SETTINGS if one.name == name]
    found = measure(setting, seeds=1)
    assert found.best_of_plain > 1.5 and found.of_best > 0.95


@pytest.mark.parametrize("clients", [1, 64])
def test_the_tax_of_no(clients: int) -> None:
    """Once it is known that drafts lose, almost all rounds are plain ones that no drafter follows."""
    machine = Machine(row=0.15, **CPU_HEAD)
    answers = steady(200, {"mtp": 0.3}, 12 if clients == 1 else 3)(random.Random(1), clients)
    score = serve(machine, answers, HEAD, clients)
    late = range(len(score.sizes) // 4, len(score.sizes))
    taxed = sum(1 for n in late if score.followed[n] or any(decision.depth for decision in score.decisions[n]))
    assert taxed < 0.25 * len(late)
    assert score.rate / serve(machine, answers, HEAD, clients, Fixed()).rate > 0.985


def random_machine(dice: random.Random) -> tuple[Machine, list[Answer]]:
    """Anything from free wide passes and perfect drafts to costly ones and hopeless drafts, some changing midway."""
    machine = Machine(
        row=dice.uniform(0.0, 0.5),
        step={"mtp": dice.uniform(0.02, 0.3), "model": dice.uniform(0.1, 0.6)},
        follow={"mtp": dice.uniform(0.0, 0.05), "model": dice.uniform(0.0, 0.3)},
        noise=dice.uniform(0.0, 0.15),
    )
    rates = {arm: (dice.random(), dice.random()) for arm in ("mtp", "model", "lookup", "long lookup")}
    turn, offered = dice.choice([0.3, 0.6, 2.0]), dice.choice([0.0, 0.3, 1.0])

    def rate(arm: str, done: float) -> float:
        return rates[arm][done > turn]

    return machine, [Answer(200, rate, lambda arm, done: offered if arm == "lookup" else 0.0) for _ in range(4)]


def test_random_worlds_lose_little_and_good_ones_are_used() -> None:
    losses, gains = [], []
    for seed in range(40):
        machine, answers = random_machine(random.Random(seed))
        arms = {"mtp": 6, "model": 8} | LOOKUP
        plain = serve(machine, answers, arms, 1, Fixed(), seed)
        auto = serve(machine, answers, arms, 1, None, seed)
        losses.append(plain.rate / auto.rate - 1)
        fixed = [Fixed(Decision(arm, depth)) for arm in ("mtp", "model", "lookup") for depth in (2, 5)]
        best = max(serve(machine, answers, arms, 1, one, seed).rate for one in fixed)
        if best > 1.3 * plain.rate:
            gains.append(auto.rate / best)
    assert max(losses) < 0.03 and sum(losses) / len(losses) < 0.0, sorted(losses)[-5:]
    assert len(gains) > 10 and sum(gains) / len(gains) > 0.9, gains


def run(policy: Policy, rounds: int, accept: dict[str, int], slope: float = 0.1, step: float = 0.06) -> list[Decision]:
    """One sequence whose drafts are right for so many tokens, and then wrong."""
    decisions = []
    for _ in range(rounds):
        (decision,) = policy.decide([Ask(0, 15, {"lookup": 0, "long lookup": 0})])
        follows = policy.follows(0) - {"lookup"}
        accepted = min(decision.depth, accept.get(decision.arm or "", 0))
        seconds = 1 + slope * decision.depth + 0.02 * len(follows)
        drafting = {} if decision.arm is None else {decision.drafter or "": step * decision.depth}
        part = RoundPart(0, decision, decision.depth, accepted, 1 + accepted)
        policy.learn(RoundResult([part], seconds + sum(drafting.values()), follows, drafting=drafting))
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize(("accept", "best"), [({"mtp": 3}, "mtp"), ({"mtp": 0, "model": 6}, "model"), ({}, None)])
def test_finds_the_best_arm(accept: dict[str, int], best: str | None) -> None:
    policy = Policy(CostTable())
    policy.join(0, {"mtp": 6, "model": 8})
    run(policy, 900, accept)
    later = [decision.arm for decision in run(policy, 100, accept)]
    assert later.count(best) >= 0.9 * len(later), later


def test_leaves_an_arm_that_turns_bad_and_comes_back() -> None:
    policy = Policy(CostTable())
    policy.join(0, HEAD)
    assert [d.arm for d in run(policy, 100, {"mtp": 4})].count("mtp") > 85
    assert [d.arm for d in run(policy, 100, {}, slope=0.25)[8:]].count("mtp") < 12
    assert [d.arm for d in run(policy, 500, {"mtp": 4})][-60:].count("mtp") > 50


def test_does_not_flap() -> None:
    """Two arms that are worth about the same: it settles on one."""
    answer = Answer(600, lambda arm, done: {"mtp": 0.7, "assistant": 0.7}[arm])
    machine = Machine(row=0.05, step={"mtp": 0.1, "assistant": 0.1}, follow={"mtp": 0.01, "assistant": 0.01})
    for seed in range(5):
        score = serve(machine, [answer], {"mtp": 6, "assistant": 6}, 1, None, seed)
        arms = [decision.arm for (decision,) in score.decisions if decision.arm]
        assert sum(a != b for a, b in itertools.pairwise(arms)) < 12


def test_a_drafter_that_was_not_followed_is_warm_before_it_is_looked_at() -> None:
    """Its drafts would be bad: but for the prompt that it reads, each draft comes after 32 tokens that it followed."""
    answer = Answer(3000, lambda arm, done: 0.3)
    score = serve(Machine(row=0.2, **CPU_HEAD), [answer], HEAD, 1)
    followed, left, looks = 0, False, 0
    for (decision,), follows in zip(score.decisions, score.followed, strict=True):
        if decision.depth:
            assert follows and (followed >= WARM or not left)
            looks += left
        followed, left = (followed + 1, left) if follows else (0, True)
    assert looks > 3


def test_text_arms_have_what_is_offered() -> None:
    policy = Policy(CostTable())
    policy.join(0, {"grammar": 15, "mtp": 6})
    dice, depths = random.Random(3), []
    for _ in range(200):
        forced = dice.choice([0, 0, 1, 2, 9])
        (decision,) = policy.decide([Ask(0, 15, {"grammar": forced})])
        assert decision.arm != "grammar" or 0 < decision.depth <= forced
        assert policy.follows(0) <= {"mtp"}, "what a constraint leaves needs no drafter"
        depths.append(decision.depth if decision.arm == "grammar" else 0)
        accepted = depths[-1]
        drafting = {"mtp": 0.3 * decision.depth} if decision.arm == "mtp" else {}
        part = RoundPart(0, decision, decision.depth, accepted, 1 + accepted)
        seconds = 1 + 0.1 * decision.depth + sum(drafting.values())
        policy.learn(RoundResult([part], seconds, policy.follows(0), drafting=drafting))
    assert max(depths) == 9 and sum(map(bool, depths)) > 90
    assert policy.decide([Ask(0, 15, None)])[0].arm != "grammar", "the tokens are not known"
    assert policy.decide([Ask(0, 0, {"grammar": 9})]) == [PLAIN]


def test_a_device_waits_for_tokens_only_where_text_drafts_pay() -> None:
    def waited(offered: float, rate: float) -> float:
        policy, rounds = Policy(CostTable(), overlaps=True), []
        asked = policy.wants_tokens

        def ask(ids: list[int]) -> bool:
            rounds.append(asked(ids))
            return rounds[-1]

        policy.wants_tokens = ask  # type: ignore[method-assign, assignment]
        answer = Answer(2000, lambda arm, done: rate, lambda arm, done: offered if arm == "long lookup" else 0.0)
        serve(Machine(row=0.02, wait=0.3, **GPU), [answer], dict(LOOKUP), 1, policy)
        return sum(rounds) / len(rounds)

    assert waited(0.05, 0.3) < 0.1
    assert waited(0.9, 0.95) > 0.8


def test_arms_that_users_name() -> None:
    policy = Policy(CostTable(), overlaps=True)
    policy.join(0, {}, named=NamedArm("mtp", 3))
    policy.join(1, {}, named=NamedArm("lookup"))
    policy.join(2, {})
    policy.join(3, HEAD)
    assert policy.follows(0) == {"mtp"} and policy.follows(1) == {"lookup"} and policy.follows(2) == frozenset()
    assert policy.wants_tokens([0, 1]) and not policy.wants_tokens([0, 2, 3])
    asks = [Ask(0, 15), Ask(1, 15, {"lookup": 0, "long lookup": 15}), Ask(2, 15), Ask(3, 15)]
    first = policy.decide(asks)
    assert first == [Decision("mtp", 3), Decision("lookup", ARMS["lookup"].first_depth), PLAIN, PLAIN]
    parts = [
        RoundPart(n, decision, decision.depth, decision.depth, 1 + decision.depth) for n, decision in enumerate(first)
    ]
    policy.learn(RoundResult(parts, 0.01))
    assert policy.decide(asks)[1].depth == 2 * ARMS["lookup"].first_depth, "all were right: its depth follows"
    assert policy.decide([Ask(0, 1), Ask(1, 15, {"lookup": 0, "long lookup": 0})]) == [Decision("mtp", 1), PLAIN]
    policy.drop(0, "mtp")
    assert policy.decide([Ask(0, 15)]) == [PLAIN] and policy.follows(0) == frozenset()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("arm", ["mtp", "lookup"])
def test_what_named_arms_cost_is_not_lost_by_the_choice(arm: str, overlaps: bool) -> None:
    """A user may name an arm that loses: other requests draft as if that had not been."""
    policy = Policy(CostTable(), overlaps=overlaps)
    for _ in range(3):
        policy.costs.learn(RoundShape(1, 1), 1.0)
    policy.join(0, {}, named=NamedArm(arm, 3))
    for _ in range(200):
        (decision,) = policy.decide([Ask(0, 15, {"lookup": 3, "long lookup": 0})])
        assert decision.depth == 3
        parts = [RoundPart(0, decision, 3, 0, 1)]
        policy.learn(RoundResult(parts, 3.0, policy.follows(0) - {"lookup"}, overlaps and arm == "lookup"))
    assert policy.balance > 2 and policy.seconds_saved(0) == 0
    policy.leave(0)
    policy.join(0, HEAD)
    assert "mtp" in {decision.arm for decision in run(policy, 60, {"mtp": 4})}


def test_a_drafter_that_fails_takes_its_arms_along_and_may_be_given_back() -> None:
    policy = Policy(CostTable())
    policy.join(0, {"mtp": 6, "model": 8})
    run(policy, 30, {"mtp": 4})
    policy.drop(0, "mtp")
    assert "mtp" not in {decision.arm for decision in run(policy, 30, {"mtp": 4})} and "mtp" not in policy.follows(0)
    policy.give(0, {"mtp": 6, "model": 8})
    assert "mtp" in {decision.arm for decision in run(policy, 400, {"mtp": 4})}


def test_late_results_of_sequences_that_have_left() -> None:
    policy = Policy(CostTable(), overlaps=True)
    policy.join(0, HEAD | LOOKUP)
    policy.join(1, HEAD)
    decisions = policy.decide([Ask(0, 15), Ask(1, 15)])
    policy.leave(0)
    policy.learn(RoundResult([RoundPart(n, d, d.depth, 0, 1) for n, d in enumerate(decisions)], 0.01))
    policy.watch(0, {"lookup": (1, 1)})
    assert len(policy.decide([Ask(1, 15)])) == 1


def test_nothing_breaks_while_sequences_come_and_go_and_drafters_fail() -> None:
    """Random joins, ends, failures, named arms, limits and late results, on both kinds of device."""
    for seed in range(6):
        dice, overlaps = random.Random(seed), bool(seed % 2)
        policy = Policy(CostTable(), overlaps=overlaps)
        running: list[int] = []
        number, late = 0, None
        for _ in range(800):
            if len(running) < dice.choice([1, 3, 20]):
                named = dice.choice([None, None, None, NamedArm("mtp", 3), NamedArm("lookup")])
                arms = dice.choice([{}, HEAD, HEAD | LOOKUP, HEAD | LOOKUP | {"model": 8, "grammar": 15}])
                policy.join(number, arms, dice.choice(["short", "code"]), named)
                running.append(number)
                number += 1
            if running and dice.random() < 0.03:
                policy.leave(running.pop(dice.randrange(len(running))))
            if running and dice.random() < 0.03:
                policy.drop(dice.choice(running), dice.choice(["mtp", "lookup", "model"]))
            if running and dice.random() < 0.03:
                policy.give(dice.choice(running), HEAD | LOOKUP)
            tokens = policy.wants_tokens(running)
            asks = []
            for one in running:
                offers = {arm: dice.choice([0, 0, 4, 15]) for arm in ("lookup", "long lookup", "grammar")}
                asks.append(Ask(one, dice.choice([0, 1, 15, 15]), offers if tokens else None))
            decisions = policy.decide(asks)
            parts = []
            for ask, decision in zip(asks, decisions, strict=True):
                assert decision.depth <= ask.limit and (decision.arm is None) == (decision.depth == 0)
                if decision.arm and ARMS[decision.arm].at_once and ask.available is not None:
                    assert decision.depth <= max(ask.available.values())
                accepted = dice.randint(0, decision.depth)
                parts.append(RoundPart(ask.id, decision, decision.depth, accepted, 1 + accepted))
            follows = frozenset().union(*(policy.follows(one) for one in running)) - {"lookup"}
            seconds = dice.choice([0.0, 1e-3, 1e-3, 1e-3, 5.0]) * (1 + 0.02 * sum(part.drafted for part in parts))
            result = RoundResult(parts, seconds, follows, tokens and overlaps, dice.random() < 0.7)
            policy.learn(late if overlaps and late is not None else result)
            late = result
            for one in running:
                if policy.needs_watch(one):
                    policy.watch(one, dice.choice([{}, {"lookup": (1, 1)}, {"grammar": (2, 0)}]))
                assert abs(policy.seconds_saved(one)) < 1e6


def test_rounds_that_a_clock_saw_no_time_in() -> None:
    policy = Policy(CostTable())
    policy.join(0, HEAD)
    for _ in range(100):
        (decision,) = policy.decide([Ask(0, 15)])
        policy.learn(RoundResult([RoundPart(0, decision, decision.depth, 0, 1)], 0.0))
    assert decision == PLAIN


def test_in_a_batch_drafts_must_pay_for_the_whole_pass() -> None:
    """Rows that are cheap beside one sequence are dear beside eight."""
    machine = Machine(row=0.02, sequence=0.0, **GOOD_HEAD)
    dear = Machine(row=0.6, **GOOD_HEAD)
    answers = steady(150, {"mtp": 0.6}, 4)(random.Random(0), 8)
    shares = []
    for one in (machine, dear):
        score = serve(one, answers, HEAD, 8)
        shares.append(sum(any(d.depth for d in mine) for mine in score.decisions) / len(score.decisions))
    assert shares[0] > 0.8 and shares[1] < 0.1, shares


def test_a_prior_is_of_its_kind() -> None:
    priors = Priors()
    for _ in range(50):
        priors.learn("lookup", "given text", 4, 4)
        priors.learn("lookup", "short", 4, 0)
    assert priors.rates("lookup", "given text")[0] > 0.9
    assert priors.rates("lookup", "short")[0] < 0.2
    assert 0.3 < priors.rates("lookup", "code")[0] < 0.7  # never seen: what all kinds together say
    assert len(priors.rates("mtp", "short")) == 1  # a guess at its first draft


@pytest.mark.parametrize(("many", "most"), [(1, 20e-6), (64, 50e-6)])
@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_deciding_takes_no_time_while_nothing_changes(many: int, most: float, rate: float) -> None:
    policy, dice, took = Policy(CostTable(), overlaps=True), random.Random(0), []
    for number in range(many):
        policy.join(number, HEAD)
    asks = [Ask(number, 15) for number in range(many)]
    for _ in range(200):
        decisions = policy.decide(asks)
        began = time.perf_counter()
        assert policy.decide(asks)
        took.append(time.perf_counter() - began)
        parts = []
        for number, decision in enumerate(decisions):
            accepted = sum(itertools.takewhile(bool, (dice.random() < rate for _ in range(decision.depth))))
            parts.append(RoundPart(number, decision, decision.depth, accepted, 1 + accepted))
        rows, deepest = sum(1 + d.depth for d in decisions), max(d.depth for d in decisions)
        policy.learn(RoundResult(parts, 0.001 * (1 + 0.01 * rows + 0.05 * deepest), policy.follows(0)))
    assert min(took[100:]) < most


# Rows of a pass go to the sequences that use them best.


def test_sharing_rows_equals_trying_everything() -> None:
    dice = random.Random(0)
    for _ in range(100):
        chances = [list(itertools.accumulate([dice.random() for _ in range(3)], lambda a, b: a * b)) for _ in range(3)]
        slope = dice.uniform(0.02, 0.4)
        rates = []
        for depths in itertools.product(range(4), repeat=3):
            tokens = 3 + sum(sum(mine[:depth]) for mine, depth in zip(chances, depths, strict=True))
            rates.append(tokens / (1 + slope * (3 + sum(depths))))
        rate, _, _, price, count = share_rows(chances, 3, 3, lambda rows, slope=slope: 1 + slope * rows)
        assert rate == pytest.approx(max(rates)), chances
        assert count == 0 or sum(chance >= price for mine in chances for chance in mine) == count


def test_rows_that_are_paid_for_anyway_are_filled() -> None:
    """A pass of 3 to 8 rows costs the same: six drafts fit, however unlikely."""
    chances = [[0.3, 0.1, 0.01, 0.001], [0.2, 0.1, 0.01, 0.001]]
    assert share_rows(chances, 2, 2, lambda rows: 1.0 if rows <= 2 else 1.1 if rows <= 8 else 3.0)[4] == 6


def test_nothing_is_drafted_where_rows_cost_what_they_bring() -> None:
    assert share_rows([[0.9, 0.8], [0.9]], 2, 2, float)[4] == 0
    assert share_rows([[], []], 2, 2, float)[4] == 0


def test_a_pass_is_widened_step_by_step() -> None:
    """Nothing is known of wide passes: the first one is not the widest that guesses would allow."""
    policy, widths = Policy(CostTable()), []
    for number in range(16):
        policy.join(number, HEAD)
    for _ in range(24):
        decisions = policy.decide([Ask(number, 15) for number in range(16)])
        parts = [RoundPart(number, d, d.depth, d.depth, 1 + d.depth) for number, d in enumerate(decisions)]
        widths.append(sum(1 + decision.depth for decision in decisions))
        policy.learn(RoundResult(parts, 0.001 * (1 + 0.001 * widths[-1]), policy.follows(0)))
    wider = [width for width in widths if width > 16]
    assert wider and wider[0] <= 32 and max(widths) > 32, wider  # one draft each at first
    assert policy.costs.times(RoundShape(16, 16)) > 0


def test_figures_of_a_busy_machine_are_unlearned() -> None:
    """What an earlier run kept says that no row is worth its draft; no drafter but the text so far is there to look."""
    machine = Machine(row=0.08, noise=0.02)
    answers = [Answer(300, lambda arm, done: 0.85, lambda arm, done: 0.8 if arm == "lookup" else 0.0)] * 3
    busy = Proportions({(1, rows): 0.98 * rows for rows in (2, 3, 4, 6, 8, 12, 16, 24)})
    rates = [serve(machine, answers, LOOKUP, 1, Policy(CostTable(earlier)), seed=5).rate for earlier in (busy, None)]
    plain = serve(machine, answers, LOOKUP, 1, Fixed(), seed=5).rate
    assert rates[1] > 1.8 * plain and rates[0] > 0.8 * rates[1], (plain, rates)
