"""Filters on the device: the tokens of `reference.choose`, or an honest "undecided"."""

import numpy as np
import pytest
import torch

from forerun.kernels.gpu import filtering
from forerun.kernels.gpu.choosing import UNDECIDED
from forerun.kernels.gpu.filtering import find_limits
from forerun.kernels.interface import LARGEST_TOP_K
from forerun.sample import Row, SamplingParams, TokenHistory, device, reference

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 256},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.1},
    {"top_k": 7, "top_p": 0.9999999},
    {},
]


def rows_with(filters, temperature=0.8, seed=0):
    return [
        Row(SamplingParams(temperature=temperature, seed=seed + n, **kind), TokenHistory((), ()), (), 5 + n, None)
        for n, kind in enumerate(filters)
    ]


def limits(logits, rows, vocab):
    params = [row.params for row in rows]

    def here(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return find_limits(
        logits.to(DEVICE),
        vocab,
        here([p.temperature for p in params], torch.float64),
        here([p.top_k for p in params], torch.int32),
        here([p.top_p for p in params], torch.float64),
        here([reference.min_p_offset(p) for p in params], torch.float64),
    )


def kept(logits, found, vocab):
    """Which tokens survive, by numpy: order numbers as the device makes them."""
    work = (logits[:, :vocab] + 0.0).numpy()
    bits = work.view(np.uint32).astype(np.int64)
    place = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF)
    order = (place << 20) | np.arange(vocab)
    alive = (order <= found.cut.cpu().numpy()[:, None]) & (work >= found.floor.cpu().numpy()[:, None])
    return torch.from_numpy(alive & (work > -INF))


@pytest.mark.parametrize("temperature", [0.05, 0.8, 3.0])
@pytest.mark.parametrize("vocab", [1, 40, 700])
def test_survivors_are_those_of_the_reference(vocab, temperature):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((len(FILTERS), vocab + 3)).astype(np.float32) * 4)
    logits[:, vocab:] = 100.0
    rows = rows_with(FILTERS, temperature)
    found = limits(logits, rows, vocab)
    assert not found.undecided.any()
    assert torch.equal(kept(logits, found, vocab), reference.survivors(logits[:, :vocab], [r.params for r in rows]))


def test_equal_logits_are_cut_by_their_ids():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(np.round(rng.standard_normal((len(FILTERS), 300))).astype(np.float32))
    logits[:, ::7] = -0.0
    logits[:, 5::11] = -INF
    rows = rows_with(FILTERS)
    found = limits(logits, rows, 300)
    assert torch.equal(kept(logits, found, 300), reference.survivors(logits + 0.0, [r.params for r in rows]))


def test_a_larger_vocabulary():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((len(FILTERS), 5003)).astype(np.float32) * 3)
    rows = rows_with(FILTERS)
    found = limits(logits, rows, 5000)
    alive = reference.survivors(logits[:, :5000], [r.params for r in rows])
    decided = (found.undecided == 0).cpu()
    assert torch.equal(kept(logits, found, 5000)[decided], alive[decided])
    assert decided[alive.sum(dim=1) <= LARGEST_TOP_K].all()
    assert device.choose(logits.to(DEVICE), rows, 5000) == reference.choose(logits, rows, 5000)


@pytest.mark.parametrize("vocab", [1030, 2049, 4000])
def test_a_narrow_nucleus_is_decided_in_any_vocabulary(vocab):
    logits = torch.from_numpy(np.random.default_rng(vocab).standard_normal((1, vocab)).astype(np.float32))
    logits[0, 5] = 30.0
    found = limits(logits, rows_with([{"top_p": 0.9}]), vocab)
    assert not found.undecided.any() and kept(logits, found, vocab).sum() == 1


def test_a_wide_nucleus_is_left_to_the_reference(monkeypatch):
    """So are more tokens near the limit than there is room for."""
    monkeypatch.setattr(filtering, "GATHERED", 64)
    logits = torch.zeros(3, 400)
    logits[1, ::40] = 20.0
    rows = rows_with([{"top_p": 0.9}, {"top_p": 0.9, "top_k": 8}, {"top_k": 9}])
    found = limits(logits, rows, 400)
    assert found.undecided.tolist() == [1, 0, 1]
    assert device.choose(logits.to(DEVICE), rows, 400) == reference.choose(logits, rows, 400)


def test_rows_do_not_feel_their_neighbours_and_greedy_ones_have_no_filters():
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((len(FILTERS) + 1, 600)).astype(np.float32) * 5)
    rows = [*rows_with(FILTERS, seed=9), *rows_with([{"top_k": 3, "top_p": 0.2}], temperature=0.0)]
    together = device.choose(logits.to(DEVICE), rows, 600)
    assert together == reference.choose(logits, rows, 600)
    for n in (0, 5, 9, 12):
        assert device.choose(logits[n : n + 1].to(DEVICE), rows[n : n + 1], 600) == together[n : n + 1]


def test_flags_tell_undecided_from_broken():
    from forerun.kernels.gpu.choosing import choose_tokens

    logits = torch.zeros(2, 3000)
    logits[1, 5] = float("nan")
    rows = rows_with([{"top_p": 0.9}, {"top_p": 0.9}])
    out, bad = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    hot, seed = torch.ones(2, dtype=torch.float64, device=DEVICE), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    place = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    choose_tokens(logits.to(DEVICE), 3000, hot, seed, place, out, bad, limits=limits(logits, rows, 3000))
    assert bad.tolist() == [UNDECIDED, 1]


@pytest.mark.gpu
def test_real_vocabularies():
    generator = torch.Generator(DEVICE).manual_seed(6)
    for vocab, scale in ((49152, 4.0), (151936, 3.0), (248320, 2.0)):
        logits = torch.randn(len(FILTERS), vocab, device=DEVICE, generator=generator) * scale
        logits[:, ::997] += 9.0  # a few tokens stand out, as they do in a model
        rows = rows_with(FILTERS, 0.7, seed=vocab)
        found, alive = (
            limits(logits, rows, vocab - 3),
            reference.survivors(logits[:, : vocab - 3], [r.params for r in rows]),
        )
        decided = found.undecided == 0
        assert decided[alive.sum(dim=1) <= LARGEST_TOP_K].all()
        assert torch.equal(kept(logits.cpu(), found, vocab - 3)[decided.cpu()], alive.cpu()[decided.cpu()])
        assert device.choose(logits, rows, vocab - 3) == reference.choose(logits, rows, vocab - 3)
