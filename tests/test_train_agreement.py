"""Training for equal choices: the share against drawn noise, its gradient against differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.train.agreement import LEAST, agreement
from forerun.train.loop import Trainer
from forerun.train.loss import Aim, Support, Teacher, draft_loss, draw_support, teacher
from forerun.train.settings import Settings

IDS, FREQUENT, HIDDEN, ROWS = 50, 40, 8, 7
HEATS = (0.3, 0.8)


def chances(rows: int, count: int, seed: int, sharp: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(rows, count, generator=generator, dtype=torch.float64)).softmax(dim=1)


def test_the_share_is_that_of_equal_choices_under_the_same_noise() -> None:
    p, q = chances(4, 6, seed=0), chances(4, 6, seed=1)
    share, _ = agreement(p, q)
    drawn = torch.empty(200_000, 6).exponential_(generator=torch.Generator().manual_seed(2))
    for row in range(4):
        theirs, mine = ((one[row].float().log() - drawn.log()).argmax(dim=1) for one in (p, q))
        seen = ((theirs == mine) & (theirs < 5)).float().mean()  # the last stands for tokens that are not listed
        assert abs(float(seen - share[row])) < 0.005


def test_equal_chances_always_agree() -> None:
    p = chances(3, 6, seed=0)
    share, gradient = agreement(p, p)
    torch.testing.assert_close(share, 1 - p[:, -1].float())
    assert float(gradient.abs().max()) < 1e-6


def test_the_gradient_is_that_of_differences() -> None:
    p, logits = chances(3, 6, seed=0), chances(3, 6, seed=1).log()
    _, gradient = agreement(p, logits.softmax(dim=1))
    for place in range(6):
        near = torch.zeros(6, dtype=torch.float64)
        near[place] = 1e-3
        ahead, behind = (agreement(p, (logits + sign * near).softmax(dim=1))[0] for sign in (1, -1))
        torch.testing.assert_close((ahead - behind) / 2e-3, gradient[:, place], atol=2e-3, rtol=0)


def lesson(aim: Aim) -> tuple[Support, Teacher, Tensor]:
    """A small output matrix, what the target says of some states, and what a head makes of them."""
    generator = torch.Generator().manual_seed(3)
    output = torch.randn(IDS, HIDDEN, generator=generator)
    support = draw_support(output, torch.arange(FREQUENT), torch.arange(FREQUENT, IDS), 6, generator)
    hidden = 0.7 * torch.randn(ROWS, HIDDEN, generator=generator)
    taught = teacher(hidden, (hidden @ output.T).logsumexp(dim=1), support, aim)
    return support, taught, 0.7 * torch.randn(ROWS, HIDDEN, generator=generator)


def whole_loss(rows: Tensor, support: Support, taught: Teacher, agree: float, weights: Tensor) -> Tensor:
    """The obvious form, whose gradient torch finds."""
    logits = rows @ support.matrix.T
    loss = -(taught.chances * (logits + support.log_share).log_softmax(dim=1)).sum(dim=1)
    for heat, p in taught.heated.items():
        few = (logits / heat + support.log_share).softmax(dim=1).gather(1, taught.listed)
        q = torch.cat((few, 1 - few.sum(dim=1, keepdim=True)), dim=1).clamp_min(LEAST)
        p = p.clamp_min(LEAST)
        ratios = torch.maximum(p[:, None] / p[:, :-1, None], q[:, None] / q[:, :-1, None])
        loss = loss - agree * ratios.sum(dim=2).reciprocal().sum(dim=1)
    return (weights * loss).sum()


@pytest.mark.parametrize("agree", [0.0, 2.0])
def test_the_loss_has_the_gradient_of_its_obvious_form(agree: float) -> None:
    aim = Aim(hard=0.2, agree=agree, heats=HEATS)
    support, taught, start = lesson(aim)
    assert bool(taught.heated) == bool(agree)
    weights = torch.linspace(0.1, 1.0, ROWS)
    fast, slow = (start.clone().requires_grad_() for _ in range(2))
    loss, drafts = draft_loss(fast, support, taught, agree, weights)
    loss.backward()
    whole_loss(slow, support, taught, agree, weights).backward()
    assert fast.grad is not None and slow.grad is not None
    torch.testing.assert_close(fast.grad, slow.grad, atol=2e-3, rtol=0)
    assert torch.equal(drafts, (start @ support.matrix[:FREQUENT].T).argmax(dim=1))


def test_following_the_gradient_makes_choices_equal() -> None:
    aim = Aim(agree=6.0, heats=HEATS)
    support, taught, start = lesson(aim)

    def shares(rows: Tensor) -> Tensor:
        q = (rows @ support.matrix.T / 0.8 + support.log_share).softmax(dim=1).gather(1, taught.listed)
        return agreement(taught.heated[0.8], torch.cat((q, 1 - q.sum(dim=1, keepdim=True)), dim=1))[0]

    rows = start.clone().requires_grad_()
    for _ in range(60):
        (gradient,) = torch.autograd.grad(draft_loss(rows, support, taught, aim.agree, torch.ones(ROWS))[0], rows)
        with torch.no_grad():
            rows -= 0.02 * gradient
    assert float((shares(rows.detach()) - shares(start)).min()) > 0.1


def test_a_trained_head_is_trained_for_equal_choices_and_a_new_one_from_some_point_on() -> None:
    fresh, trained = Settings(), Settings(start_from="head")
    assert fresh.aim(0.0) == fresh.aim(0.59) == (0.2, 0.0)
    assert fresh.aim(0.6) == fresh.aim(1.0) == (0.0, 6.0)
    assert trained.aim(0.0) == trained.aim(1.0) == (0.0, 6.0)
    assert Settings(start_from="head", hard=0.1, agree=0.0).aim(0.5) == (0.1, 0.0)
    assert Settings(agree_from=0.0).aim(0.0) == (0.0, 6.0)


def test_the_loop_follows_what_a_run_is_trained_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = object.__new__(Trainer)
    trainer.settings = Settings()
    seen: list[Aim] = []
    monkeypatch.setattr(Trainer, "_drafted", lambda _self, _batch, _support, aim, _missed: (seen.append(aim), []))
    for fraction in (0.0, 0.9):
        trainer.loss(None, None, fraction)  # type: ignore[arg-type]
    assert seen == [Aim(0.2, 0.0, (0.3, 0.8)), Aim(0.0, 6.0, (0.3, 0.8))]
