"""A controller that has lost: neural arms are tried again, and in a batch drafts are charged for their rows."""

from __future__ import annotations

import pytest
from test_controller import scripted

from forerun.policy.controller import Controller
from forerun.policy.costs import CostTable
from forerun.policy.decision import PLAIN, Decision

SEQUENCES, DRAFTS = 8, 3
PLAIN_PASS, WIDE_PASS = 1.0, 1.6  # seconds of a pass of all sequences, and of one with the drafts of one of them


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("arm", ["mtp", "model"])
def test_a_losing_neural_arm_is_tried_again(arm: str, steady: bool) -> None:
    """Nobody watches what it would have said: only a trial can tell that the text now suits it."""
    world = scripted({arm: 0}, {arm: 6}, turn=80)
    _, _, decisions = world.run(400, Controller({arm: 6}, CostTable(), steady=steady))
    before, after = [[decision.arm for decision in part] for part in (decisions[20:80], decisions[-50:])]
    assert 0 < before.count(arm) < 10, before
    assert after.count(arm) > 40, after


def batch_costs() -> CostTable:
    """A plain pass of one sequence takes 0.5 s, of eight 1 s, and three rows more 0.6 s more; a draft costs nothing."""
    costs = CostTable()
    for _ in range(300):  # averages forget slowly
        costs.learn(None, 0, 1, 0.0, 0.5)
        costs.learn(None, 0, SEQUENCES, 0.0, PLAIN_PASS, sequences=SEQUENCES)
        costs.learn(None, 0, SEQUENCES + DRAFTS, 0.0, WIDE_PASS, sequences=SEQUENCES)
        costs.learn_draft("mtp", DRAFTS, 0.0)
    return costs


@pytest.mark.parametrize("accepted", [0, 1, DRAFTS])
def test_in_a_batch_drafts_earn_their_tokens_and_pay_for_their_rows(accepted: int) -> None:
    controller = Controller({"mtp": DRAFTS}, batch_costs(), plain_first=0)
    controller.decide(DRAFTS, others=SEQUENCES - 1)
    controller.learn(Decision("mtp", DRAFTS), DRAFTS, accepted, WIDE_PASS)
    worth = accepted * PLAIN_PASS / SEQUENCES  # a plain pass of all gives one token to each
    assert controller.saved == pytest.approx(worth - (WIDE_PASS - PLAIN_PASS), abs=1e-3)


def test_drafts_that_lose_in_a_batch_lead_into_debt() -> None:
    controller = Controller({"mtp": DRAFTS}, batch_costs(), plain_first=0)
    controller.decide(DRAFTS, others=SEQUENCES - 1)
    for _ in range(3):
        controller.learn(Decision("mtp", DRAFTS), DRAFTS, DRAFTS, WIDE_PASS)  # all right, and still not worth it
    assert controller.decide(DRAFTS) == PLAIN  # alone now, where such drafts would pay


@pytest.mark.parametrize(("used", "tried"), [("mtp", "model"), ("model", "mtp")])
def test_a_drafter_may_fail_in_the_round_of_a_trial(used: str, tried: str) -> None:
    """The one in use, or the one on trial: what came of the round is learned all the same."""
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, 1.0)
    controller = Controller({"mtp": 3, "model": 3}, costs, plain_first=0)
    controller.current, controller.trial = Decision(used, 2), tried
    controller.drop("mtp")
    controller.learn(Decision(tried, 2), 2, 1, 1.2)
    assert controller.decide(3).arm in (None, "model") and controller.current.arm in (None, "model")
