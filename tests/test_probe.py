"""The probe passes where rows are independent, and fails, narrows and says so where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import CPU, decoder, engine, pool_for, request, run
from tiny import tiny_model
from tiny_gemma import tiny_gemma
from tiny_qwen import random_model, save_model
from torch import Tensor

import forerun
from forerun.engine.probe import RowCounts, probe
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import Activation, AttentionSpec, LayerPages, PassRows
from forerun.kernels.matrix import Matrix, TiledMatrix
from forerun.kernels.reference import ReferenceKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

WIDTHS = [2, 3, 4, 5, 8, 12, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m"), "llama", hidden_size=72, intermediate_size=88, head_dim=20)


@torch.inference_mode()
def probed(folder: Path, kernels: ReferenceKernels | CpuKernels) -> dict[int, bool]:
    model = build(open_checkpoint(folder), kernels, CPU, torch.float32, NullProgress())
    pool = pool_for(model)
    result = dict(probe(model, pool, WIDTHS).widths)
    pool.check([])
    return result


@pytest.mark.parametrize("kernels", [CpuKernels(True), CpuKernels(False), ReferenceKernels()])
def test_our_bodies_pass(folder: Path, kernels: ReferenceKernels | CpuKernels) -> None:
    assert all(probed(folder, kernels).values())


class WideProduct(ReferenceKernels):
    """From 5 rows on another order of summation."""

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        if len(x) < 5:
            return super().linear(x, matrix)
        weight, half = matrix.weight, x.shape[1] // 2  # type: ignore[union-attr]
        return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T


class LeakyAttention(ReferenceKernels):
    """A row that looks at the longest sequence of the batch."""

    def attention(self, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
        out = super().attention(qkv, spec, rows, layer)
        return out * (1 + 1e-6 * (len(rows.position) - 1))


def test_a_product_that_changes_bits_is_found(folder: Path) -> None:
    # Two sequences share the pass, so a width of 3 already has 6 rows.
    assert probed(folder, WideProduct()) == {2: True, 3: False, 4: False, 5: False, 8: False, 12: False, 16: False}


def test_attention_that_sees_its_neighbours_is_found(folder: Path) -> None:
    assert not any(probed(folder, LeakyAttention()).values())


def test_the_engine_narrows_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.kernels.cpu.CpuKernels", lambda quantize: WideProduct())
    model = forerun.load(str(folder))
    assert not model.probe.guaranteed and model.engine.max_width == 2
    answer = forerun.generate(model, "hello hello hello", max_tokens=30)
    assert not answer.guaranteed
    assert answer.drafted <= answer.rounds  # never more than one draft per round


def test_a_width_of_one_is_plain_decoding(folder: Path) -> None:
    model: Decoder = decoder(folder, quantize=True)
    (answer,) = run(engine(model, max_width=1), request([5, 6, 5, 6, 5, 6], draft="lookup"))
    assert answer.counters.drafted == 0


def test_numbers_of_rows_are_tried_once(folder: Path) -> None:
    """`WideProduct` is good up to 4 rows; every later question is answered from memory."""
    model = build(open_checkpoint(folder), WideProduct(), CPU, torch.float32, NullProgress())
    counts = RowCounts(model)
    assert [counts.keep_bits(rows) for rows in (1, 4, 5, 64)] == [True, True, False, False]
    model.kernels.linear = None  # type: ignore[assignment]
    assert [counts.keep_bits(rows) for rows in (1, 4, 5, 64)] == [True, True, False, False]


def test_every_place_among_many_rows_is_tried(folder: Path) -> None:
    class OneBadRow(ReferenceKernels):
        def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
            out = super().linear(x, matrix)
            if len(x) == 100:
                out[77] = out[77].nextafter(torch.tensor(torch.inf))
            return out

    model = build(open_checkpoint(folder), OneBadRow(), CPU, torch.float32, NullProgress())
    assert RowCounts(model).keep_bits(99) and not RowCounts(model).keep_bits(100)


def test_gated_products_are_tried_as_such(folder: Path) -> None:
    class Drifts(ReferenceKernels):
        def gated_linear(self, x: Tensor, matrix: Matrix, activation: Activation = "silu") -> Tensor:
            out = super().gated_linear(x, matrix, activation)
            return out if len(x) < 20 else out.nextafter(torch.tensor(torch.inf))

    model = build(open_checkpoint(folder), Drifts(), CPU, torch.float32, NullProgress())
    assert RowCounts(model).keep_bits(19) and not RowCounts(model).keep_bits(20)


def test_a_matrix_of_floats_is_tried_beside_one_of_the_same_shape_in_8_bits(tmp_path: Path) -> None:
    """A router is never quantised; here it has the shape of what its experts begin with."""

    class FloatsDrift(CpuKernels):
        def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
            out = super().linear(x, matrix)
            assert isinstance(matrix, TiledMatrix)
            drifts = matrix.shape[0] == 80 and matrix.exact and len(x) >= 20
            return out.nextafter(torch.tensor(torch.inf)) if drifts else out

    folder = save_model(tmp_path, random_model(sparse=True, num_experts=80, moe_intermediate_size=40))
    model = build(open_checkpoint(folder), FloatsDrift(quantize=True), CPU, torch.float32, NullProgress())
    found = [matrix for matrix in model.matrices() if matrix.shape[0] == 80]
    assert {isinstance(matrix, TiledMatrix) and matrix.exact for matrix in found} == {True, False}
    assert RowCounts(model).keep_bits(19) and not RowCounts(model).keep_bits(20)


def test_gated_products_are_tried_with_the_activation_that_serves(tmp_path: Path) -> None:
    class GeluDrifts(ReferenceKernels):
        def gated_linear(self, x: Tensor, matrix: Matrix, activation: Activation = "silu") -> Tensor:
            out = super().gated_linear(x, matrix, activation)
            drifts = activation == "gelu_tanh" and len(x) >= 20
            return out.nextafter(torch.tensor(torch.inf)) if drifts else out

    folder = tiny_gemma(tmp_path, "31B")
    model = build(open_checkpoint(folder), GeluDrifts(), CPU, torch.float32, NullProgress())
    assert RowCounts(model).keep_bits(19) and not RowCounts(model).keep_bits(20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_half_precision_are_compared_by_numbers(folder: Path, dtype: torch.dtype) -> None:
    """What overflows is not equal to itself: no width would pass."""
    model = build(open_checkpoint(folder), ReferenceKernels(), CPU, dtype, NullProgress())
    counts = RowCounts(model)
    assert counts.keep_bits(16)
    assert all(product._alone.isfinite().all() for product in counts._probes)
