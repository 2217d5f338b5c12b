"""Choosing and committing on the device: the tokens of `reference.choose`, and the walk of `accept_coupled`."""

import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from forerun.kernels import portable
from forerun.kernels.gpu import choosing
from forerun.kernels.gpu.choosing import BROKEN, UNDECIDED, _gumbel, _gumbel_bound, choose_tokens, scratch_for
from forerun.kernels.gpu.committing import accept
from forerun.sample import Row, RowError, SamplingParams, TokenHistory, device, noise, reference
from forerun.sample.acceptance import accept_coupled
from forerun.sample.masks import packed

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def row(position=5, history=(), allowed=None, **params):
    return Row(SamplingParams(**params), TokenHistory(history, ()), (), position, allowed)


def random_rows(rng, count):
    """Every third is greedy, some are nearly so; seeds fill 64 bits."""
    return [
        row(
            temperature=0.0 if n % 3 == 0 else float(rng.choice([1e-6, 0.05, 0.8, 1.0, 2.5])),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            choice=int(rng.integers(0, 2**32)),
            position=int(rng.integers(0, 10**6)),
        )
        for n in range(count)
    ]


def on_device(logits, rows, vocab, ids=None, out=None):
    """Tokens and bad flags of a call."""

    def here(values, dtype):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    out = torch.full((len(rows),), -1, device=DEVICE) if out is None else out
    bad = torch.full((len(rows),), -1, dtype=torch.int32, device=DEVICE)
    choose_tokens(
        logits.to(DEVICE),
        vocab,
        here([r.params.temperature for r in rows], torch.float64),
        here([[*noise.split_seed(r.params.seed), r.params.choice] for r in rows], torch.int64),
        here([r.position for r in rows], torch.int64),
        out,
        bad,
        ids,
    )
    return out.tolist(), bad.tolist()


@triton.jit
def both_kernel(words, exact, bound, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    word = tl.load(words + index).to(tl.uint32)
    tl.store(exact + index, _gumbel(word))
    tl.store(bound + index, _gumbel_bound(word))


def test_noise_has_the_bits_of_portable_and_stays_below_its_bound():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 16384)
    words[:4096] = 2**32 - 1 - np.arange(4096)
    words[4096:8192] = np.arange(4096)
    words[8192:8256] = [(1 << n // 2) - n % 2 for n in range(64)]
    near = [
        2**-0.5,
        2**-1.5,
        np.exp(-(2**-0.5)),
        np.exp(-(2**0.5)),
        np.exp(-(2**1.5)),
    ]  # where a log changes its octave
    words[9000:10000] = np.concatenate([int(u * 2**32) + np.arange(-100, 100) for u in near])
    exact = torch.empty(len(words), dtype=torch.float64, device=DEVICE)
    bound = torch.empty_like(exact)
    both_kernel[(1,)](torch.from_numpy(words).to(DEVICE), exact, bound, COUNT=len(words), enable_fp_fusion=False)
    exact, gap = exact.cpu().numpy(), (bound - exact).cpu().numpy()
    assert (exact == portable.gumbel(words, np)).all()
    assert gap.min() > 5e-5  # half of the margin is left
    assert (gap < 2e-4 + 0.66 * (1 - words / 2**32))[words > 2**31].all()  # tight enough to rule out most tokens


@pytest.mark.parametrize("vocab", [1, 5, 64, 300])
def test_tokens_are_those_of_the_reference(vocab):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((9, vocab + 5)).astype(np.float32) * 3)
    rows = random_rows(rng, 9)
    tokens, bad = on_device(logits, rows, vocab)
    assert tokens == reference.choose(logits, rows, vocab) and not any(bad)


def test_a_larger_vocabulary():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((4, 5003)).astype(np.float32))
    rows = [row(temperature=1.0, seed=n, position=n) for n in range(4)]
    expected = reference.choose(logits, rows, 5000)
    assert on_device(logits, rows, 5000)[0] == expected and max(expected) > choosing.BLOCK


def test_scores_have_the_bits_of_the_reference_and_do_not_depend_on_the_other_rows(monkeypatch):
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((5, 200)).astype(np.float32))
    rows = [row(temperature=0.3 + n / 3, seed=n << 35, choice=n, position=n) for n in range(5)]
    params = [r.params for r in rows]
    g = noise.gumbel_rows([p.seed for p in params], [p.choice for p in params], range(5), 200, torch.device("cpu"))
    expected = (logits.double() + torch.tensor([[p.temperature] for p in params], dtype=torch.float64) * g).amax(-1)
    scratch = scratch_for(5, 200, DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(choosing, "scratch_for", lambda *_: scratch)
        tokens, _ = on_device(logits, rows, 200)
    assert torch.equal(scratch[0][:, 0].cpu(), expected)
    assert [on_device(logits[n : n + 1], rows[n : n + 1], 200)[0][0] for n in (4, 2)] == [tokens[4], tokens[2]]


@pytest.mark.parametrize("count", [64, 65, 200])
def test_blocks_are_merged_in_order(count, monkeypatch):
    monkeypatch.setattr(choosing, "BLOCK", 64)
    rng = np.random.default_rng(count)
    logits = torch.from_numpy(np.round(rng.standard_normal((4, count))).astype(np.float32))
    rows = [row(), row(temperature=0.9, seed=1), row(temperature=1e-6, seed=2), row(temperature=2.0, seed=3)]
    assert on_device(logits, rows, count)[0] == reference.choose(logits, rows, count)


def test_ties_go_to_the_lower_id(monkeypatch):
    monkeypatch.setattr(choosing, "BLOCK", 64)
    logits = torch.zeros(3, 130)
    logits[0, [70, 129]] = 1.0
    logits[1] = -0.0
    logits[1, 100] = 0.0
    logits[2] = 1e30  # swallows the noise
    rows = [row(), row(), row(temperature=1.0)]
    assert on_device(logits, rows, 130)[0] == reference.choose(logits, rows, 130) == [70, 0, 0]


def test_equal_scores_go_to_the_lower_id_whatever_their_bounds():
    huge = 1.5 * 2**53  # its neighbours are 2 away: noise below 1 leaves it as it is
    g = torch.from_numpy(noise.gumbel(0, 0, 5, np.arange(300)))
    bounded_above = (g > 0.8) & (g < 0.95)  # their bounds are not rounded to `huge`
    logits = torch.where(g < 0.95, huge, -INF).float().repeat(2, 1)
    first = int(bounded_above.nonzero()[0])
    logits[1, :first] = -INF
    rows = [row(temperature=1.0)] * 2
    tokens, _ = on_device(logits, rows, 300)
    assert tokens == reference.choose(logits, rows, 300)
    assert tokens[0] < first == tokens[1]


def test_impossible_tokens_are_never_chosen():
    logits = torch.full((3, 90), -INF)
    logits[:, 41] = -1e30
    logits[1, 43] = 0.0
    rows = [row(temperature=1.0), row(temperature=1e6), row()]
    assert on_device(logits, rows, 90) == ([41, 43, 41], [0, 0, 0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_flagged_alone(temperature, monkeypatch):
    monkeypatch.setattr(choosing, "BLOCK", 64)
    logits = torch.zeros(5, 100)
    logits[0, 3] = float("nan")
    logits[1, 70] = INF
    logits[2] = -INF
    logits[3], logits[3, 0] = -INF, float("nan")
    logits[4, 99] = float("nan")  # beyond the vocabulary nobody looks
    tokens, bad = on_device(logits, [row(temperature=temperature)] * 5, 99)
    assert bad == [1, 1, 1, 1, 0] and tokens[:4] == [0, 0, 0, 0]


def test_keys_use_all_their_bits():
    logits = torch.zeros(7, 300)
    seeds = [1, 2**32, 2**32 + 1, 2**63, 2**63 + 1, 2**64 - 1]
    rows = [row(temperature=1.0, seed=seed) for seed in seeds]
    rows.append(row(temperature=1.0, seed=1, choice=2**32 - 1, position=2**31))
    tokens, _ = on_device(logits, rows, 300)
    assert tokens == reference.choose(logits, rows, 300) and len(set(tokens)) > 5


def test_a_reduced_vocabulary_is_keyed_by_target_ids():
    rng = np.random.default_rng(3)
    ids = torch.from_numpy(np.sort(rng.choice(300, 70, replace=False)))
    logits = torch.from_numpy(rng.standard_normal((6, 70)).astype(np.float32))
    logits[5] = 0.5
    rows = [row(temperature=t, seed=7, position=n) for n, t in enumerate([0.0, 0.5, 1.0, 1.0, 2.0, 0.0])]
    spread = torch.full((6, 300), -INF)
    spread[:, ids] = logits
    tokens, bad = on_device(logits, rows, 70, ids.to(DEVICE))
    assert tokens == reference.choose(spread, rows, 300) and not any(bad)
    assert tokens[5] == int(ids[0])


def test_strides_and_half_precision():
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((6, 128)).astype(np.float32)).bfloat16()
    rows = [row(temperature=0.9, position=n) for n in range(3)]
    board = torch.full((3, 4), -1, device=DEVICE)
    on_device(logits.to(DEVICE)[::2], rows, 120, out=board[:, 2])
    assert board[:, 2].tolist() == reference.choose(logits[::2].float(), rows, 120)
    assert (board[:, [0, 1, 3]] == -1).all()


def test_device_body_edits_filters_and_leaves_little_to_the_reference(monkeypatch):
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((7, 80)).astype(np.float32)).to(DEVICE)
    rows = [
        row(temperature=1.0, seed=1),
        row(temperature=1.0, seed=1, top_p=0.5),
        row(history=[3, 4], repetition_penalty=1.3),
        row(top_k=3),  # greedy: filters cannot matter
        row(temperature=0.8, logit_bias={5: 3.0}, seed=2),
        row(temperature=0.8, allowed=packed(range(1, 80, 2), 80)),
        row(temperature=0.8, top_k=300),
    ]
    expected, before = reference.choose(logits, rows, 77), logits.clone()
    asked = []
    monkeypatch.setattr(device, "_choose_rest", lambda *given: asked.append(given[3]) or [expected[6]])
    assert device.choose(logits, rows, 77) == expected
    assert asked == [[6]] and torch.equal(logits, before)
    assert torch.equal(device.probabilities(logits, rows, 77), reference.probabilities(logits, rows, 77))


def test_a_mask_does_not_hide_a_broken_row():
    logits = torch.zeros(2, 10, device=DEVICE)
    logits[1, 4] = float("nan")
    rows = [row(), row(suppress=frozenset({4}), temperature=0.5)]
    with pytest.raises(RowError, match="infinite or not a number") as caught:
        device.choose(logits, rows, 10)
    assert caught.value.row == 1


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_device_body_names_the_broken_row(params):
    logits = torch.zeros(4, 10, device=DEVICE)
    rows = [row(), row(temperature=1.0, top_k=2), row(**params), row()]
    logits[2, 4] = float("nan")
    with pytest.raises(RowError, match="infinite or not a number") as caught:
        device.choose(logits, rows, 10)
    assert caught.value.row == 2
    logits[2] = -INF
    with pytest.raises(RowError, match="every token is ruled out") as caught:
        device.choose(logits, rows, 10)
    assert caught.value.row == 2


def test_cuda_tensors_go_to_the_device_body(monkeypatch):
    module = sys.modules["forerun.sample.choose"]

    class OnCuda:
        ndim, shape, device = 2, (1, 8), torch.device("cuda")

        def __len__(self):
            return 1

    monkeypatch.setattr(device, "choose", lambda *_: ["device"])
    monkeypatch.setattr(module.reference, "choose", lambda *_: ["torch"])
    assert module.choose(OnCuda(), [row()], 8) == ["device"]
    assert module.choose(torch.eye(8)[3:4], [row()], 8) == [3]
    monkeypatch.setattr(module, "device_body", lambda: None)
    assert module.choose(OnCuda(), [row()], 8) == ["torch"]


def commit_twin(tokens, chosen, bad, drafted, live, limit, final, position, slot, kept, parity):
    """What `accept` does, in Python lists: accepted, result; `final` and the states change in place."""
    accepted, result = [], []
    for lane, line in enumerate(tokens):
        count, left = 0, limit[lane] - position[lane] - 2
        if live[lane]:
            drafts = line[1 : 1 + drafted[lane]]
            count, _ = accept_coupled(chosen[lane][: len(drafts) + 1], drafts)
            if any(bad[lane][: count + 1]):
                count = next(row for row, flag in enumerate(bad[lane]) if flag) - 1
        count = max(-1, min(count, left))
        if live[lane]:
            final[lane] = chosen[lane][count] if count >= 0 else final[lane]
            position[lane] += count + 1
            kept[slot[lane]] = count + 1
            parity[slot[lane]] ^= 1
        accepted.append(count)
        result.append([*chosen[lane], count, int(live[lane] and bad[lane][0] == BROKEN)])
    return accepted, result


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("recurrent", [False, True])
def test_accept_walks_as_the_host_does(width, recurrent):
    rng = np.random.default_rng(width)
    lanes = 12
    chosen = rng.integers(0, 3, (lanes, width))
    tokens = rng.integers(0, 3, (lanes, width))
    agree = rng.random((lanes, width - 1)) < 0.8
    tokens[:, 1:][agree] = chosen[:, :-1][agree]
    tokens[0, 1:] = chosen[0, :-1]  # all of them, and with fewer drafts all of those
    drafted = rng.integers(0, width, lanes)
    drafted[:2] = width - 1
    live = (rng.random(lanes) < 0.8).astype(int)
    live[:4] = [1, 0, 1, 1]
    states = {
        "position": rng.integers(0, 1000, lanes),
        "slot": np.where(live, rng.permutation(lanes), lanes),  # idle lanes share the spare one
        "kept": np.full(lanes + 1, 7),
        "parity": rng.integers(0, 2, lanes + 1),
    }
    bad = rng.choice([0, BROKEN, UNDECIDED], (lanes, width), p=[0.8, 0.1, 0.1])
    bad[0], bad[2, 0], bad[3, 0] = 0, UNDECIDED, BROKEN
    limit = states["position"] + rng.integers(1, 20, lanes)  # 1: the answer has ended
    limit[0] = limit[0] + 20

    def here(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    long = torch.int64
    on = {name: here(values) for name, values in states.items()}
    accepted, final = here([-1] * lanes), here([-1] * lanes, long)
    result = torch.full((lanes, width + 2), -1, device=DEVICE)
    accept(
        *(here(tokens, long), here(chosen, long), here(bad), here(drafted), here(live), on["position"]),
        *(accepted, final, result, here(limit)),
        *([on["slot"], on["kept"], on["parity"]] if recurrent else []),
    )
    host = {name: values.tolist() for name, values in states.items()}
    lists = [values.tolist() for values in (tokens, chosen, bad, drafted, live, limit)]
    ends = [-1] * lanes
    expected = commit_twin(*lists, ends, host["position"], host["slot"], host["kept"], host["parity"])
    assert (accepted.tolist(), result.tolist()) == expected and final.tolist() == ends
    assert on["position"].tolist() == host["position"]
    assert max(expected[0]) == width - 1  # lane 0: the whole width
    for name in ("kept", "parity"):
        assert on[name].tolist() == (host[name] if recurrent else states[name].tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_vocabularies(dtype):
    generator = torch.Generator(DEVICE).manual_seed(6)
    for vocab, scale in ((151936, 3.0), (248320, 0.1), (248320, 1e-3)):
        logits = (torch.randn(16, vocab, device=DEVICE, generator=generator) * scale).to(dtype)
        rows = random_rows(np.random.default_rng(vocab), 16)
        assert on_device(logits, rows, vocab - 3)[0] == reference.choose(logits, rows, vocab - 3)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_inputs():
    logits = torch.zeros(2, 5000, device=DEVICE)
    seed = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    position = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    heat = torch.ones(2, dtype=torch.float64, device=DEVICE)
    out, bad = torch.empty_like(position), torch.empty(2, dtype=torch.int32, device=DEVICE)
    arguments = (logits, 5000, heat, seed, position, out, bad)
    choose_tokens(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_tokens(*arguments)
    for step in range(3):
        seed[:, 0] = step
        position += 1
        graph.replay()
        rows = [row(temperature=1.0, seed=step, position=step + 1)] * 2
        assert out.tolist() == reference.choose(logits, rows, 5000)
