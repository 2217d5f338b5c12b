"""Triton norms, activations and gates against the reference, and rows against the same rows alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.kernels.gpu import norms
from forerun.kernels.interface import Joined
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding
SLOW = ReferenceKernels()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(mine: Tensor, reference: Tensor) -> None:
    assert mine.dtype == reference.dtype and mine.isfinite().all()
    torch.testing.assert_close(mine, reference, atol=CLOSE[mine.dtype] / 100, rtol=CLOSE[mine.dtype])


def check_rows(function: Callable[[slice], Tensor], rows: int) -> None:
    """The last row alone and the first together without it have the bits they have among all."""
    everything = function(slice(0, rows))
    assert torch.equal(function(slice(rows - 1, rows)), everything[rows - 1 :])
    assert torch.equal(function(slice(0, rows - 1)), everything[: rows - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 72, 2048])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    wider = random(3, width + 8, dtype=dtype) * 8
    weight = random(width, seed=1)
    for x in (wider[:, :width].contiguous(), wider[:, 8:]):  # the second is a slice of columns
        check(norms.rms_norm(x, weight, 1e-5), SLOW.rms_norm(x, weight, 1e-5))
        check_rows(lambda rows, x=x: norms.rms_norm(x[rows], weight, 1e-5), 3)


def test_rms_norm_of_small_numbers_depends_on_eps() -> None:
    x, weight = random(2, 16) * 1e-3, random(16, seed=1)
    check(norms.rms_norm(x, weight, 1e-2), SLOW.rms_norm(x, weight, 1e-2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow")  # exp of a large gate is infinite, as it should be
@pytest.mark.parametrize("width", [72, 1500])  # the last takes two blocks
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    both = random(3, 2 * width, dtype=dtype) * 30  # far tails of exp included
    both[0, 0], both[0, 1] = -200, 200
    check(norms.silu_mul(both), SLOW.silu_mul(both))
    check_rows(lambda rows: norms.silu_mul(both[rows]), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("width", [24, 1100])
def test_sigmoid_gate(width: int, shared: bool, dtype: torch.dtype) -> None:
    x = random(3, width + 5, dtype=dtype)[:, 2 : width + 2]
    gate = random(3, 7 + (1 if shared else width), seed=1, dtype=dtype) * 10
    check(norms.sigmoid_gate(x, gate, 7), SLOW.sigmoid_gate(x, gate, 7))
    check_rows(lambda rows: norms.sigmoid_gate(x[rows], gate[rows], 7), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 24, 128])
def test_gated_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = random(3, 4 * size, dtype=dtype) * 5, random(size, seed=1)
    gate = random(3, 8 + 4 * size + 8, seed=2, dtype=dtype) * 10  # columns after the gate's are not its own
    check(norms.gated_norm(x, gate, 8, weight, 1e-6), SLOW.gated_norm(x, gate, 8, weight, 1e-6))
    check_rows(lambda rows: norms.gated_norm(x[rows], gate[rows], 8, weight, 1e-6), 3)


def test_no_rows() -> None:
    nothing = random(0, 32)
    assert norms.rms_norm(nothing, random(32), 1e-5).shape == (0, 32)
    assert norms.silu_mul(nothing).shape == (0, 16)
    assert norms.sigmoid_gate(nothing, nothing, 0).shape == (0, 32)
    assert norms.gated_norm(nothing, nothing, 0, random(16), 1e-5).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1100])
def test_embed(width: int, dtype: torch.dtype) -> None:
    table, tokens = random(7, width, dtype=dtype), torch.tensor([6, 0, 3, 3], device=DEVICE)
    assert torch.equal(norms.embed(tokens, table), SLOW.embed(tokens, table))
    assert norms.embed(tokens[:0], table).shape == (0, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_added_norms(dtype: torch.dtype) -> None:
    """As the reference has them, and a row's bits are its own."""
    from forerun.kernels.cuda import CudaKernels

    mine, theirs = CudaKernels(torch.device(DEVICE)), ReferenceKernels()
    generator = torch.Generator().manual_seed(3)
    x, before = (torch.randn(5, 37, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.rand(37, generator=generator)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.04, "rtol": 0.02}
    weights = [weight.to(DEVICE) * size for size in (1.0, 0.5, 2.0, 1.5, 0.8, 1.2)]
    other = torch.randn(5, 37, generator=generator).to(DEVICE, dtype)
    for count in range(4):
        for beside in (None, other):
            joined = None if beside is None else Joined(weights[4], beside, weights[5])
            found = mine.add_norm(x, weights[0], 1e-6, before, 0.75, weights[1 : 1 + count], joined)
            expected = theirs.add_norm(x, weights[0], 1e-6, before, 0.75, weights[1 : 1 + count], joined)
            assert len(found) == 1 + count
            for each, right in zip(found, expected, strict=True):
                torch.testing.assert_close(each, right, **close)
            last = joined and Joined(joined.norm, other[3:4].clone(), joined.other_norm)
            again = x[3:4].clone(), weights[0], 1e-6, before[3:4].clone(), 0.75, weights[1 : 1 + count], last
            for each, alone in zip(found, mine.add_norm(*again), strict=True):
                assert torch.equal(each[3:4], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 20])
def test_inputs_of_layers(size: int, dtype: torch.dtype) -> None:
    from forerun.kernels.cuda import CudaKernels

    seen, table = random(4, 3 * size, dtype=dtype) * 5, random(7, 3 * size, seed=1, dtype=dtype)
    norm, tokens = random(size, seed=2).abs(), torch.tensor([6, 0, 3, 3], device=DEVICE)
    mine = CudaKernels(torch.device(DEVICE))
    found = mine.layer_inputs(seen, 0.3, norm, 1e-6, tokens, table, 2.5)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.04, "rtol": 0.02}
    torch.testing.assert_close(found, SLOW.layer_inputs(seen, 0.3, norm, 1e-6, tokens, table, 2.5), **close)
    alone = mine.layer_inputs(seen[2:3].clone(), 0.3, norm, 1e-6, tokens[2:3].clone(), table, 2.5)
    assert torch.equal(alone[0], found[2])


def test_logits_of_clusters() -> None:
    from forerun.kernels.cuda import CudaKernels

    generator = torch.Generator().manual_seed(4)
    x, table = torch.randn(3, 40, generator=generator).to(DEVICE), torch.randn(7, 5, 40, generator=generator).to(DEVICE)
    clusters = torch.tensor([[6, 0], [2, 3], [1, 5]], device=DEVICE)
    found = CudaKernels(torch.device(DEVICE)).cluster_logits(x, table, clusters)
    torch.testing.assert_close(found, ReferenceKernels().cluster_logits(x, table, clusters), atol=1e-4, rtol=1e-4)
