"""Acceptance: coupled by walking, rejection by its distribution, with a mutant that the statistics must catch."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from forerun.sample import (
    Row,
    SamplingParams,
    TokenHistory,
    accept_coupled,
    accept_rejection,
    acceptance,
    choose,
    draw,
    noise,
    probabilities,
)

VOCAB = 7
PROMPT = (2, 5)
DEPTH = 2
# everything on at once: the filters really cut, and penalties depend on every token before the row
PROCESSORS = {
    "temperature": 1.1,
    "top_k": 5,
    "top_p": 0.93,
    "min_p": 0.04,
    "logit_bias": {1: 0.8, 4: -0.6},
    "suppress": frozenset({6}),
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.15,
}


def chi_square(counts, expected):
    """(statistic, degrees of freedom) with rare outcomes pooled; an impossible outcome makes it infinite."""
    if any(expected.get(outcome, 0.0) <= 0 for outcome in counts):
        return math.inf, 1
    total = sum(counts.values())
    common = [outcome for outcome, p in expected.items() if p * total >= 8]
    bins = [(counts[outcome], expected[outcome] * total) for outcome in common]
    rest = (total - sum(n for n, _ in bins), total - sum(e for _, e in bins))
    if rest[1] > 1:
        bins.append(rest)
    return sum((n - e) ** 2 / e for n, e in bins), len(bins) - 1


def fits(counts, expected):
    statistic, freedom = chi_square(counts, expected)
    return statistic <= freedom + 10 * math.sqrt(2 * freedom)


class Toy:
    """Two language models over seven tokens, each a fixed function of the tokens so far, and their distributions."""

    def __init__(self, **params):
        self.params = params
        self._known = {}

    def distribution(self, model, answer):
        key = (model, answer)
        if key not in self._known:
            shared = np.random.default_rng([1, *PROMPT, *answer]).standard_normal(VOCAB)
            own = np.random.default_rng([2 + model, *PROMPT, *answer]).standard_normal(VOCAB)
            logits = torch.tensor(1.5 * shared + 0.9 * own, dtype=torch.float32)
            # the answer as drafted tokens: what a row in the middle of a round sees
            row = Row(SamplingParams(**self.params), TokenHistory(PROMPT), answer, len(PROMPT) + len(answer))
            self._known[key] = probabilities(logits[None], [row], VOCAB)[0]
        return self._known[key]

    def joint(self, length):
        """The exact probability of every answer of `length` tokens."""
        joint = {}
        for answer in itertools.product(range(VOCAB), repeat=length):
            p = 1.0
            for n in range(length):
                p *= float(self.distribution(0, answer[:n])[answer[n]]) if p else 0.0
            joint[answer] = p
        return joint

    def generate(self, seed, length, sampled):
        """Rounds of rejection as the engine runs them: (answer, drafts accepted)."""
        params = SamplingParams(**self.params, seed=seed)
        answer, accepted_in_all = (), 0
        while len(answer) < length:
            drafts = []
            for _ in range(DEPTH):
                q = self.distribution(1, (*answer, *drafts))
                position = len(PROMPT) + len(answer) + len(drafts)
                drafts.append(draw(q, params, position) if sampled else int(q.argmax()))
            p = torch.stack([self.distribution(0, (*answer, *drafts[:n])) for n in range(DEPTH + 1)])
            q = torch.stack([self.distribution(1, (*answer, *drafts[:n])) for n in range(DEPTH)]) if sampled else None
            accepted, final = accept_rejection(p, drafts, q, params, len(PROMPT) + len(answer))
            answer = (*answer, *drafts[:accepted], final)
            accepted_in_all += accepted
        return answer[:length], accepted_in_all


def simulate(toy, draws, sampled):
    counts, accepted = Counter(), 0
    for seed in range(draws):
        answer, n = toy.generate(seed, 3, sampled)
        counts[answer] += 1
        accepted += n
    return counts, accepted


@pytest.fixture(scope="module")
def toy():
    return Toy(**PROCESSORS)


def test_the_toy_is_hard_enough(toy):
    p, q = toy.distribution(0, ()), toy.distribution(1, ())
    assert 0.1 < float((p - q).abs().sum()) / 2 < 0.9
    supports = {int((toy.distribution(0, (a, b)) > 0).sum()) for a in range(6) for b in range(6)}
    assert max(supports) <= 5 and len(supports) >= 3  # the filters cut, and not always alike


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "deterministic"])
def test_rejection_gives_the_exact_joint_distribution(toy, sampled):
    counts, accepted = simulate(toy, 20_000, sampled)
    assert accepted > 5_000
    assert fits(counts, toy.joint(3)), chi_square(counts, toy.joint(3))


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "deterministic"])
def test_a_wrong_residual_is_caught(toy, sampled, monkeypatch):
    monkeypatch.setattr(acceptance, "_residual", lambda p, q, draft: p)
    counts, _ = simulate(toy, 5_000, sampled)
    assert not fits(counts, toy.joint(3))


def test_an_argmax_draft_passed_off_as_a_sample_is_caught(toy, monkeypatch):
    monkeypatch.setitem(globals(), "draw", lambda q, params, position: int(q.argmax()))
    counts, _ = simulate(toy, 5_000, sampled=True)
    assert not fits(counts, toy.joint(3))


def test_choose_draws_from_probabilities(toy):
    draws = 20_000
    logits = torch.tensor([0.3, 2.0, -0.7, 1.1, 0.9, 1.6, 2.2])
    for params in ({"temperature": 0.9}, PROCESSORS):
        rows = [
            Row(SamplingParams(**params, seed=seed), TokenHistory(PROMPT, [1]), (3,), position)
            for seed in range(draws // 4)
            for position in range(4)
        ]
        tokens = choose(logits.expand(len(rows), -1), rows, VOCAB)
        p = probabilities(logits[None], rows[:1], VOCAB)[0].tolist()
        assert fits(Counter(tokens), dict(enumerate(p)))
        # neighbouring positions, and neighbouring seeds, are independent
        pairs = {(a, b): p[a] * p[b] for a in range(VOCAB) for b in range(VOCAB)}
        assert fits(Counter(zip(tokens[::2], tokens[1::2], strict=True)), pairs)
        assert fits(Counter(zip(tokens[:-4:8], tokens[4::8], strict=True)), pairs)


def test_draw_has_the_distribution_and_is_the_same_without_numba(monkeypatch):
    p = torch.tensor([0.0, 3.0, 1.0, 0.5, 0.0, 2.0, 0.01])  # need not sum to one
    keys = [(SamplingParams(seed=seed), position) for seed in range(2500) for position in range(4)]
    tokens = [draw(p, params, position) for params, position in keys]
    assert fits(Counter(tokens), dict(enumerate((p / p.sum()).tolist())))
    monkeypatch.setattr(acceptance, "compiled_body", lambda: None)
    assert [draw(p, params, position) for params, position in keys[:200]] == tokens[:200]
    large = torch.rand(5003)
    slow = [draw(large, params, position) for params, position in keys[:20]]
    monkeypatch.undo()
    assert slow == [draw(large, params, position) for params, position in keys[:20]]


def test_coupled_walks_to_the_first_difference():
    assert accept_coupled([4], []) == (0, 4)
    assert accept_coupled([4, 5, 6], [4, 5]) == (2, 6)
    assert accept_coupled([4, 5, 6], [4, 9]) == (1, 5)
    assert accept_coupled([4, 5, 6], [9, 5]) == (0, 4)


@pytest.mark.parametrize("with_q", [False, True])
def test_rejection_at_temperature_zero_is_exact_match(with_q):
    rng = np.random.default_rng(0)
    for seed in range(200):
        best = rng.integers(0, 4, 4).tolist()
        drafts = [int(token) if rng.random() < 0.7 else int(rng.integers(0, 4)) for token in best[:3]]
        p = torch.nn.functional.one_hot(torch.tensor(best), 4).double()
        q = torch.nn.functional.one_hot(torch.tensor(drafts), 4).double() if with_q else None
        assert accept_rejection(p, drafts, q, SamplingParams(seed=seed), 0) == accept_coupled(best, drafts)


def test_rejection_accepts_everything_when_p_is_q():
    p = torch.rand(4, 9, dtype=torch.float64).softmax(-1)
    for seed in range(100):
        params = SamplingParams(temperature=1.0, seed=seed)
        drafts = [draw(p[j], params, j) for j in range(3)]
        accepted, final = accept_rejection(p, drafts, p[:3], params, 0)
        assert accepted == 3 and 0 <= final < 9


def test_an_empty_residual_falls_back_to_p():
    p = np.array([0.25, 0.75])
    assert acceptance._residual(p, p.copy(), 0) is p
    assert acceptance._residual(np.array([0.0, 1.0]), None, 1).tolist() == [0.0, 1.0]


def test_a_draft_outside_q_counts_as_deterministic():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    results = Counter(accept_rejection(p, [0], q, SamplingParams(temperature=1.0, seed=s), 0) for s in range(4000))
    assert set(results) == {(1, 0), (0, 1)}
    assert 1800 < results[(1, 0)] < 2200


def test_without_drafts_the_token_is_drawn_from_p():
    p = torch.tensor([[0.2, 0.0, 0.8]], dtype=torch.float64)
    tokens = Counter(accept_rejection(p, [], None, SamplingParams(temperature=1.0, seed=s), 3)[1] for s in range(4000))
    assert fits(tokens, {0: 0.2, 2: 0.8})


def test_streams_are_separate():
    assert len({noise.CHOOSE, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL}) == 4
