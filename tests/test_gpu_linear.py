"""Products on a GPU, or in Triton's interpreter, beside plain torch; and rows that do not feel their neighbours."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from forerun.engine.probe import cancelling_rows
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu.linear import Products, Tiling, tiling
from forerun.kernels.matrix import FloatMatrix
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(40, 72), (96, 64), (33, 200)]


def matrix(outputs: int, inputs: int, bias: bool = False) -> FloatMatrix:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(DEVICE)
    return FloatMatrix(weight, torch.randn(outputs, generator=generator).to(DEVICE) if bias else None)


def rows_of(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(DEVICE)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_product_with_bias_and_residual(shape: tuple[int, int], splits: int) -> None:
    weights, x = matrix(*shape, bias=True), rows_of(19, shape[1])
    before = rows_of(19, shape[0])
    got = Products(DEVICE)(x, weights, residual=before, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, before + F.linear(x, weights.weight, weights.bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_gated_product(splits: int) -> None:
    weights, x = matrix(80, 72, bias=True), rows_of(3, 72)
    gate, up = F.linear(x, weights.weight, weights.bias).chunk(2, dim=1)
    got = Products(DEVICE)(x, weights, gated=True, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, F.silu(gate) * up, atol=1e-4, rtol=1e-4)
    got = Products(DEVICE)(x, weights, gated=True, gelu=True, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, F.gelu(gate, approximate="tanh") * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
def test_product_as_a_gate(splits: int) -> None:
    """What it opens may be columns of something wider; with and without splits, and by torch in a prompt."""
    weights, x, wide = matrix(40, 72), rows_of(19, 72), rows_of(19, 60)
    own, cut = wide[:, 11:51], Tiling(16, 16, 32, splits, 4, 3)
    expected = F.gelu(F.linear(x, weights.weight), approximate="tanh") * own
    got = Products(DEVICE)(x, weights, gates=own, cut=cut)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(Products(DEVICE)(x[7:8], weights, gates=own[7:8], cut=cut), got[7:8])
    for kernels in (CudaKernels(DEVICE), ReferenceKernels()):
        for prefill in (False, True):
            found = kernels.gate_linear(x, weights, own, prefill)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_alone_and_among_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights, products = matrix(*shape), Products(DEVICE)
    weights = FloatMatrix(weights.weight.to(dtype), None)
    x = cancelling_rows(35, shape[1]).to(DEVICE, dtype)
    alone = torch.cat([products(row, weights) for row in x.split(1)])
    for count in (2, 16, 17, 33, 35):
        for first in (0, 35 - count):
            assert torch.equal(products(x[first : first + count], weights), alone[first : first + count])


@pytest.mark.parametrize("splits", [1, 2])
def test_capped_product(splits: int) -> None:
    """Large results are as good as the cap, and none is more."""
    weights, x = matrix(40, 72), rows_of(3, 72) * 5
    x[0] *= 1e4
    got = Products(DEVICE)(x, weights, cap=30.0, cut=Tiling(16, 16, 32, splits, 4, 3))
    expected = 30 * (F.linear(x.double(), weights.weight.double()) / 30).tanh()
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-5)
    assert bool((got.abs() <= 30).all())


def test_columns_of_a_wider_row() -> None:
    weights, wide = matrix(40, 72), rows_of(4, 100)
    torch.testing.assert_close(Products(DEVICE)(wide[:, 20:92], weights), F.linear(wide[:, 20:92], weights.weight))


def test_counters_are_left_at_zero() -> None:
    products, weights = Products(DEVICE), matrix(40, 72)
    products(rows_of(20, 72), weights, cut=Tiling(16, 16, 16, 4, 4, 3))
    assert not products.counters.any()


@pytest.mark.parametrize(
    "shape", [(576, 576), (3072, 576), (49152, 576), (2560, 9216), (248320, 2560), (1, 2048), (64, 2560)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_tilings_fit_the_matrix(shape: tuple[int, int], gated: bool) -> None:
    cut = tiling(*shape, gated=gated)
    assert cut.splits * cut.inputs <= 2 * shape[1] and cut.outputs >= 16
    assert all(tiling(*shape, gated=gated, tile=tile).splits == cut.splits for tile in (32, 64, 128))
