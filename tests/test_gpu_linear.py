"""Products on a GPU, or in Triton's interpreter, beside plain torch; and rows that do not feel their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forerun.engine.probe import cancelling_rows
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu import linear as module
from forerun.kernels.gpu.linear import ProductLauncher, Tiling, row_tile, tiling, tiling_for, wide_tilings
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
    got = ProductLauncher(DEVICE)(x, weights, residual=before, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, before + F.linear(x, weights.weight, weights.bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_gated_product(splits: int) -> None:
    weights, x = matrix(80, 72, bias=True), rows_of(3, 72)
    gate, up = F.linear(x, weights.weight, weights.bias).chunk(2, dim=1)
    got = ProductLauncher(DEVICE)(x, weights, gated=True, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, F.silu(gate) * up, atol=1e-4, rtol=1e-4)
    got = ProductLauncher(DEVICE)(x, weights, gated=True, gelu=True, cut=Tiling(16, 16, 32, splits, 4, 3))
    torch.testing.assert_close(got, F.gelu(gate, approximate="tanh") * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [1, 2])
def test_product_as_a_gate(splits: int) -> None:
    """What it opens may be columns of something wider; with and without splits."""
    weights, x, wide = matrix(40, 72), rows_of(19, 72), rows_of(19, 60)
    own, cut = wide[:, 11:51], Tiling(16, 16, 32, splits, 4, 3)
    expected = F.gelu(F.linear(x, weights.weight), approximate="tanh") * own
    got = ProductLauncher(DEVICE)(x, weights, gates=own, cut=cut)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(ProductLauncher(DEVICE)(x[7:8], weights, gates=own[7:8], cut=cut), got[7:8])
    for kernels in (CudaKernels(DEVICE), ReferenceKernels()):
        torch.testing.assert_close(kernels.gate_linear(x, weights, own), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_alone_and_among_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights, products = matrix(*shape), ProductLauncher(DEVICE)
    weights = FloatMatrix(weights.weight.to(dtype), None)
    x = cancelling_rows(35, shape[1]).to(DEVICE, dtype)
    alone = torch.cat([products(row, weights) for row in x.split(1)])
    for count in (2, 16, 17, 33, 35):
        for first in (0, 35 - count):
            assert torch.equal(products(x[first : first + count], weights), alone[first : first + count])


FINISHES = ["plain", "residual", "gates", "capped", "silu", "gelu"]


def finish(name: str, rows: int, outputs: int) -> dict[str, Any]:
    """What comes after the sums. Neighbours are columns of something wider, as they are in a model."""
    beside = rows_of(rows, outputs + 24)[:, 8 : outputs + 8]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "residual": {"residual": beside},
        "gates": {"gates": beside},
        "capped": {"cap": 30.0, "dtype": torch.float32},
        "silu": {"gated": True},
        "gelu": {"gated": True, "gelu": True},
    }
    return options[name]


@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize(("inputs", "splits"), [(72, 1), (256, 2), (300, 3), (520, 4), (200, 4)])
def test_wide_tiles_give_the_bits_of_a_row_alone(inputs: int, splits: int, kind: str) -> None:
    """Splits that are whole, short, and empty; several bands of row tiles, the last of them not full."""
    rows = 16 * module.BAND + 37
    weights, x = matrix(2 * 38, inputs, bias=True), cancelling_rows(rows, inputs).to(DEVICE)
    options = finish(kind, rows, 38 if kind in ("silu", "gelu") else 76)
    got = ProductLauncher(DEVICE)(x, weights, cut=Tiling(16, 32, 32, splits, 4, 3, in_turn=True), **options)
    few = Tiling(16, 16, 32, splits, 4, 3)
    assert torch.equal(got, ProductLauncher(DEVICE)(x, weights, cut=few, **options))
    for row in (0, 17, rows - 1):
        here = slice(row, row + 1)
        alone = {name: value[here] if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        assert torch.equal(ProductLauncher(DEVICE)(x[here], weights, cut=few, **alone), got[here])


@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_tiles_agree_with_torch(kind: str, dtype: torch.dtype) -> None:
    weights, x = matrix(80, 264, bias=True), rows_of(35, 264).to(dtype)
    assert weights.bias is not None
    weights = FloatMatrix((weights.weight / 16).to(dtype), weights.bias.to(dtype))
    options = finish(kind, 35, 40 if kind in ("silu", "gelu") else 80)
    options = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    got = ProductLauncher(DEVICE)(x, weights, cut=Tiling(16, 32, 64, 3, 4, 3, in_turn=True), **options)
    assert weights.bias is not None
    product = F.linear(x.float(), weights.weight.float(), weights.bias.float())
    gate, up = product.chunk(2, dim=1)
    expected = {
        "plain": lambda: product,
        "residual": lambda: product + options["residual"],
        "gates": lambda: F.gelu(product, approximate="tanh") * options["gates"],
        "capped": lambda: 30 * (product / 30).tanh(),
        "silu": lambda: F.silu(gate) * up,
        "gelu": lambda: F.gelu(gate, approximate="tanh") * up,
    }[kind]()
    close = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.float(), expected, atol=close, rtol=close)


def test_rows_past_the_edge_change_nothing() -> None:
    """A captured pass is padded with rows that may hold anything."""
    weights, x = matrix(40, 256), rows_of(35, 256)
    cut = Tiling(16, 32, 32, 2, 4, 3, in_turn=True)
    right = ProductLauncher(DEVICE)(x, weights, cut=cut)
    x[20:] = float("nan")
    assert torch.equal(ProductLauncher(DEVICE)(x, weights, cut=cut)[:20], right[:20])


def test_many_rows_choose_wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the choice that a model's products make, with tiles for an interpreter."""
    monkeypatch.setattr(module, "WIDE_ROWS", 32)
    monkeypatch.setattr(module, "WIDE", ((64, 3), (32, 4)))
    monkeypatch.setattr(module, "wide_tilings", lambda *_: [Tiling(32, 32, 64, splits, 4, 3, in_turn=True)])
    monkeypatch.setattr(module, "microseconds", lambda cut, *_: float(not cut.in_turn))
    splits = tiling(40, 520, gated=False).splits
    assert splits > 1
    tiling_for.cache_clear()
    try:
        assert module.tiling_for(40, 520, gated=False, rows=16, wide=True) == tiling(40, 520, gated=False)
        assert module.tiling_for(40, 520, gated=False, rows=35, wide=True).in_turn
        assert not module.tiling_for(40, 520, gated=False, rows=35, wide=False).in_turn
        weights = FloatMatrix(matrix(40, 520).weight.bfloat16(), None)
        x = cancelling_rows(35, 520).to(DEVICE, torch.bfloat16)
        products = ProductLauncher(DEVICE)
        together, alone = products(x, weights), torch.cat([products(rows, weights) for rows in x.split(16)])
        assert torch.equal(together, alone)
    finally:
        tiling_for.cache_clear()


@pytest.mark.parametrize(
    "shape", [(18432, 2560), (2560, 9216), (2560, 4096), (12352, 2560), (960, 576), (576, 1536), (248320, 2560)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_the_choice_of_tiles_keeps_the_splits(shape: tuple[int, int], gated: bool) -> None:
    """Few rows never have wide tiles, many always, and the splits are those of a row alone."""
    splits = tiling(*shape, gated=gated).splits
    chosen = {rows: tiling_for(*shape, gated, rows, True) for rows in (1, 16, 64, 65, 128, 256, 512, 2048)}
    assert all(cut.splits == splits for cut in chosen.values())
    assert not any(chosen[rows].in_turn for rows in (1, 16, 64)) and chosen[2048].in_turn
    for cut in wide_tilings(gated, splits):
        assert (cut.rows + cut.outputs * (1 + gated)) * cut.inputs * 2 * cut.stages <= module.WIDE_BYTES


@pytest.mark.skipif(DEVICE.type != "cuda", reason="real shapes, in the format of models")
@pytest.mark.parametrize(
    ("shape", "gated"),
    [((18432, 2560), True), ((2560, 9216), False), ((12352, 2560), False), ((960, 576), False), ((6144, 1024), True)],
)
def test_real_shapes_keep_bits(shape: tuple[int, int], gated: bool) -> None:
    weights = FloatMatrix(matrix(*shape).weight.bfloat16(), None)
    x = cancelling_rows(600, shape[1]).to(DEVICE, torch.bfloat16)
    products = ProductLauncher(DEVICE)
    alone = torch.cat([products(rows, weights, gated=gated) for rows in x.split(16)])
    for rows in (65, 100, 256, 600):
        assert torch.equal(products(x[:rows], weights, gated=gated), alone[:rows])
    for cut in [*wide_tilings(gated, tiling(*shape, gated).splits), tiling(*shape, gated, row_tile(600))]:
        assert torch.equal(products(x, weights, gated=gated, cut=cut), alone)


@pytest.mark.parametrize("splits", [1, 2])
def test_capped_product(splits: int) -> None:
    """Large results are as good as the cap, and none is more."""
    weights, x = matrix(40, 72), rows_of(3, 72) * 5
    x[0] *= 1e4
    got = ProductLauncher(DEVICE)(x, weights, cap=30.0, cut=Tiling(16, 16, 32, splits, 4, 3))
    expected = 30 * (F.linear(x.double(), weights.weight.double()) / 30).tanh()
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=1e-5)
    assert bool((got.abs() <= 30).all())


def test_columns_of_a_wider_row() -> None:
    weights, wide = matrix(40, 72), rows_of(4, 100)
    torch.testing.assert_close(
        ProductLauncher(DEVICE)(wide[:, 20:92], weights), F.linear(wide[:, 20:92], weights.weight)
    )


def test_counters_are_left_at_zero() -> None:
    products, weights = ProductLauncher(DEVICE), matrix(40, 72)
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
