"""Keyed noise: the published Philox vectors, the same bits from every body, and the right distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from forerun.kernels import portable
from forerun.sample import noise

kernels = pytest.importorskip("forerun.sample.kernels", reason="needs numba")

# Random123's known answers for Philox4x32-10: counter, key, result
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
EDGE_WORDS = np.array([0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1], dtype=np.int64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers_in_every_body(counter, key, answer):
    assert portable.philox(*counter, *key) == answer
    as_arrays = [np.array([word], dtype=np.int64) for word in (*counter, *key)]
    assert [int(word[0]) for word in portable.philox(*as_arrays)] == list(answer)
    as_tensors = [torch.tensor([word], dtype=torch.int64) for word in (*counter, *key)]
    assert [int(word) for word in portable.philox(*as_tensors)] == list(answer)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_kernel_gives_the_published_answers(counter, key, answer):
    words = np.empty(4, dtype=np.uint64)
    block, position, choice, stream = counter
    u = np.uint64
    kernels.fill_words(block * 4, u(stream), u(position), u(choice), u(key[0]), u(key[1]), words)
    assert words.tolist() == list(answer)


def test_counter_and_key_layout():
    seed = 0x0123456789ABCDEF
    got = noise.words(seed, 5, 9, np.arange(40), stream=3).tolist()
    for token in (0, 3, 4, 39):
        assert got[token] == portable.philox(token // 4, 9, 5, 3, 0x89ABCDEF, 0x01234567)[token % 4]


def test_noise_is_the_same_in_numpy_torch_and_numba():
    ids = np.arange(1001)
    seed, choice, position = 2**63 + 12345, 3, 77
    in_numpy = noise.gumbel(seed, choice, position, ids)
    in_torch = noise.gumbel_rows([seed], [choice], [position], len(ids), torch.device("cpu"))[0].numpy()
    words = noise.words(seed, choice, position, ids, 0).astype(np.uint64)
    in_numba = [kernels.score(np.float32(0.0), 1.0, word) for word in words]
    assert np.array_equal(in_numpy, in_torch)
    assert np.array_equal(in_numpy, np.array(in_numba))


def test_noise_of_a_token_does_not_depend_on_the_others_asked_for():
    everything = noise.gumbel(7, 0, 3, np.arange(50_000))
    some = np.array([49_999, 0, 8191, 17])
    assert np.array_equal(noise.gumbel(7, 0, 3, some), everything[some])


@pytest.mark.parametrize("change", [{"seed": 2}, {"seed": 1 + 2**32}, {"choice": 1}, {"position": 1}, {"stream": 1}])
def test_every_part_of_the_key_matters(change):
    key = {"seed": 1, "choice": 0, "position": 0, "stream": 0}
    ids = np.arange(64)
    assert not np.any(noise.gumbel(**key, ids=ids) == noise.gumbel(**(key | change), ids=ids))
    assert noise.uniform(**key) != noise.uniform(**(key | change))


def test_both_tails_survive():
    g = portable.gumbel(EDGE_WORDS, np)
    assert np.all(np.isfinite(g)) and np.all(np.diff(g) > 0)
    lowest, highest = -math.log(33 * math.log(2)), 33 * math.log(2)
    assert g[0] == pytest.approx(lowest, rel=1e-14)
    assert g[-1] == pytest.approx(highest, rel=1e-9)  # −log(−log(1 − ε)) = −log ε − ε/2
    assert len(np.unique(g.astype(np.float32))) >= len(g) - 1  # the middle pair may meet in float32
    assert highest < kernels.LARGEST_GUMBEL


def test_exp_and_log_are_accurate():
    x = np.concatenate([-np.geomspace(1e-12, 39.9, 2000), [0.0]])
    assert np.allclose(portable.scaled_exp(x, np) / 2.0**42, np.exp(x), rtol=1e-14, atol=0)
    near_one = np.geomspace(1e-12, 0.4, 500)
    y = np.concatenate([np.geomspace(1e-12, 30, 2000), 1 + near_one, 1 - near_one])
    assert np.allclose(portable.log(y, np), np.log(y), rtol=2e-15, atol=1e-300)


def test_exp_and_log_have_the_same_bits_everywhere():
    x = -np.geomspace(1e-9, 60, 3001)
    y = np.geomspace(1e-10, 40, 3001)
    assert np.array_equal(portable.scaled_exp(x, np), portable.scaled_exp(torch.from_numpy(x), torch).numpy())
    assert np.array_equal(portable.scaled_exp(x, np), [kernels.scaled_exp(v) for v in x])
    assert np.array_equal(portable.weights(x, np), [kernels.weight(v) for v in x])
    assert np.array_equal(portable.log(y, np), portable.log(torch.from_numpy(y), torch).numpy())
    assert np.array_equal(portable.log(y, np), [kernels.log(v) for v in y])


def test_the_cheap_bound_on_noise_is_one():
    rng = np.random.default_rng(0)
    words = np.concatenate([EDGE_WORDS, 2**32 - 2 ** np.arange(32), rng.integers(0, 2**32, 2000)]).astype(np.uint64)
    scores = [kernels.score(np.float32(0.0), 1.0, word) for word in words]
    zero = np.zeros(1, dtype=np.float32)
    for word, score in zip(words, scores, strict=True):
        assert kernels.any_promising(zero, 0, 1, 1.0, np.array([word]), score)


def test_noise_is_gumbel_and_uniform():
    g = np.concatenate([noise.gumbel(seed, 0, 0, np.arange(5000)) for seed in range(4)])
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-6
    u = [noise.uniform(seed, 0, position) for seed in range(40) for position in range(50)]
    assert stats.kstest(u, "uniform").pvalue > 1e-6
