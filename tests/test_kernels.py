"""Fast CPU bodies against the reference, and rows against the same rows alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from passes import one_sequence, ragged
from torch import Tensor

from forerun.engine.probe import ProductProbe, cancelling_rows
from forerun.kernels.cpu import CpuKernels
from forerun.kernels.interface import Angles, AttentionSpec, HeadLayout, HeadNorms, LayerPages, PassRows
from forerun.kernels.matrix import Matrix
from forerun.kernels.reference import ReferenceKernels

SHAPES = [(30, 20), (88, 72), (64, 64), (960, 576), (131, 1000)]
PAGE = 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_integer_products_equal_the_reference_to_the_bit(shape: tuple[int, int], bias: bool) -> None:
    weight, offset = random(*shape), random(shape[0], seed=3) if bias else None
    x = torch.cat([random(5, shape[1], seed=1), cancelling_rows(3, shape[1]), torch.zeros(1, shape[1])])
    slow, packed, own = ReferenceKernels(True), CpuKernels(True), CpuKernels(True)
    own.fbgemm = False  # the loop used on machines without fbgemm
    expected = slow.linear(x, slow.matrix(weight, offset), False)
    for fast in (packed, own):
        for prefill in (False, True):
            assert torch.equal(fast.linear(x, fast.matrix(weight, offset), prefill), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_digits_are_precise(shape: tuple[int, int]) -> None:
    """14 bits of activation: the error of a product is that of the weights alone, but for one part in 8000."""
    weight, x = random(*shape), random(6, shape[1], seed=1)
    kernels = CpuKernels(True)
    matrix = kernels.matrix(weight, None)
    rounded = (weight / matrix.scale[:, None]).round() * matrix.scale[:, None]  # type: ignore[union-attr]
    exact = x.double() @ rounded.double().T
    error = (kernels.linear(x, matrix, False) - exact).norm() / exact.norm()
    assert error < 2e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_float_products_agree(shape: tuple[int, int]) -> None:
    weight, offset, x = random(*shape), random(shape[0], seed=3), random(7, shape[1], seed=1)
    kernels = CpuKernels(False)
    for prefill in (False, True):
        out = kernels.linear(x, kernels.matrix(weight, offset), prefill)
        torch.testing.assert_close(out, x @ weight.T + offset, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_keep_bits_at_every_width(quantize: bool, shape: tuple[int, int]) -> None:
    kernels = CpuKernels(quantize)
    matrix = kernels.matrix(random(*shape), None)
    product = ProductProbe(kernels, matrix, torch.device("cpu"), torch.float32)
    for width in range(1, 18):
        assert product.keeps_bits(width)


def test_the_probe_sees_a_changed_order_of_summation() -> None:
    """A product that splits K for wide passes, as GEMM libraries do, must not pass."""

    class Splitting(ReferenceKernels):
        def linear(self, x: Tensor, matrix: Matrix, prefill: bool) -> Tensor:
            if len(x) < 4:
                return super().linear(x, matrix, prefill)
            weight, half = matrix.weight, x.shape[1] // 2  # type: ignore[union-attr]
            return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T

    kernels = Splitting()
    matrix = kernels.matrix(random(64, 256), None)
    product = ProductProbe(kernels, matrix, torch.device("cpu"), torch.float32)
    same = {w: product.keeps_bits(w) for w in (2, 3, 4, 8)}
    assert same == {2: True, 3: True, 4: False, 8: False}


@pytest.mark.parametrize("width", [16, 20, 72, 88])
def test_norms_and_activations(width: int) -> None:
    fast, slow = CpuKernels(False), ReferenceKernels()
    x, weight = random(9, width) * 8, random(width, seed=2)
    torch.testing.assert_close(fast.rms_norm(x, weight, 1e-5), slow.rms_norm(x, weight, 1e-5), atol=1e-5, rtol=1e-5)
    both = random(9, 2 * width) * 30  # far tails of exp included
    torch.testing.assert_close(fast.silu_mul(both), slow.silu_mul(both), atol=1e-5, rtol=1e-5)
    for kernels in (fast, slow):
        for row in range(9):
            one = slice(row, row + 1)
            assert torch.equal(kernels.rms_norm(x[one], weight, 1e-5), kernels.rms_norm(x, weight, 1e-5)[one])
            assert torch.equal(kernels.silu_mul(both[one]), kernels.silu_mul(both)[one])


def attention_case(size: int, seed: int = 0) -> tuple[HeadLayout, LayerPages, PassRows, Tensor]:
    """Three sequences of different lengths; one of them crosses a page inside its rows."""
    layout = HeadLayout(6, 2, size)
    layer = LayerPages(random(12, 2, size, PAGE, seed=seed), random(12, 2, PAGE, size, seed=seed + 1))
    rows = ragged([5, 4, 1], [6, 25, 0], [[3, 1], [7, 2, 5, 0], [4]])
    return layout, layer, rows, random(10, layout.width, seed=seed + 2)


@pytest.mark.parametrize("size", [12, 16, 20, 64])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (11, 0.0), (0, 2.0), (5, 30.0)])
def test_attention_agrees_and_keeps_bits(size: int, window: int, softcap: float) -> None:
    layout, layer, rows, qkv = attention_case(size)
    fast, slow = CpuKernels(False), ReferenceKernels()
    twin = LayerPages(layer.keys.clone(), layer.values.clone())
    angles = Angles(random(30, size // 2, seed=8), random(30, size // 2, seed=9))
    turned = qkv.clone()
    fast.rotate(qkv, 0, 8, size, rows, angles)
    slow.rotate(turned, 0, 8, size, rows, angles)
    torch.testing.assert_close(qkv, turned, atol=1e-5, rtol=1e-5)
    fast.store(qkv, layout, rows, layer)
    slow.store(qkv, layout, rows, twin)
    assert torch.equal(layer.keys, twin.keys) and torch.equal(layer.values, twin.values)
    spec = AttentionSpec(layout, window, softcap=softcap)
    out = fast.attention(qkv, spec, rows, layer, False)
    torch.testing.assert_close(out, slow.attention(qkv, spec, rows, layer, False), atol=1e-5, rtol=1e-5)
    for sequence, start, count in rows.spans():  # a row alone: same bits, whoever ran beside it
        for offset in range(count):
            row = slice(start + offset, start + offset + 1)
            single = fast.attention(qkv[row].clone(), spec, one_sequence(rows, sequence, offset, 1), layer, False)
            assert torch.equal(single, out[row])
    for sequence, start, count in rows.spans():  # the prefill form is another routine for the same maths
        here = slice(start, start + count)
        chunk = fast.attention(qkv[here], spec, one_sequence(rows, sequence), layer, True)
        torch.testing.assert_close(chunk, out[here], atol=1e-5, rtol=1e-5)


def test_what_lies_beyond_a_row_does_not_reach_it() -> None:
    """NaN in slots that are not yet written must not leak through a masked product."""
    layout, layer, rows, qkv = attention_case(16)
    kernels = CpuKernels(False)
    clean = kernels.attention(qkv, AttentionSpec(layout), rows, layer, False)
    page, slot = divmod(6 + 5, PAGE)  # the first sequence ends there
    layer.keys[int(rows.block_tables[0][0, page]), :, :, slot:] = float("nan")
    layer.values[int(rows.block_tables[0][0, page]), :, slot:] = float("nan")
    assert torch.equal(kernels.attention(qkv, AttentionSpec(layout), rows, layer, False), clean)


@pytest.mark.parametrize("kernels", [CpuKernels(False), ReferenceKernels()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("how", [{}, {"scale": 1.0}, {"scale": 0.5, "softcap": 1.5, "window": 7}])
def test_the_maths_of_attention(kernels: ReferenceKernels, how: dict[str, float]) -> None:
    """Against a softmax written out, in decode and in prefill, with the keys of a layer that has fewer heads."""
    _, layer, rows, qkv = attention_case(16)
    queries = HeadLayout(4, 0, 16)
    spec = AttentionSpec(queries, **how)  # type: ignore[arg-type]
    qkv = qkv[:, : queries.width].contiguous()
    before = LayerPages(layer.keys.clone(), layer.values.clone())
    angles = Angles(random(30, 8, seed=8), random(30, 8, seed=9))
    kernels.rotate_and_store(qkv, queries, rows, layer, angles, HeadNorms(random(16), random(16), 1e-6))
    assert torch.equal(layer.keys, before.keys) and torch.equal(layer.values, before.values), "queries store nothing"
    out = kernels.attention(qkv, spec, rows, layer, False)
    for sequence, start, count in rows.spans():
        here = slice(start, start + count)
        prefill = kernels.attention(qkv[here], spec, one_sequence(rows, sequence), layer, True)
        torch.testing.assert_close(prefill, out[here], atol=1e-5, rtol=1e-5)
        pages = rows.block_tables[0][sequence].tolist()
        keys = torch.cat([layer.keys[page] for page in pages], dim=2)  # [kv heads, size, length]
        values = torch.cat([layer.values[page] for page in pages], dim=1)
        for offset in range(count):
            at = int(rows.position[sequence]) + offset
            seen = slice(max(0, at + 1 - spec.window) if spec.window else 0, at + 1)
            for head, query in enumerate(qkv[start + offset].view(4, 16)):
                scores = query @ keys[head // 2][:, seen] * (spec.scale or 0.25)
                scores = spec.softcap * torch.tanh(scores / spec.softcap) if spec.softcap else scores
                expected = scores.softmax(-1) @ values[head // 2][seen]
                mine = out[start + offset, 16 * head : 16 * head + 16]
                torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_head_norm_touches_its_heads_only() -> None:
    fast, slow = CpuKernels(False), ReferenceKernels()
    x, weight = random(4, 60), random(12, seed=4)
    mine, theirs = x.clone(), x.clone()
    fast.head_norm(mine, 12, 3, weight, 1e-6)
    slow.head_norm(theirs, 12, 3, weight, 1e-6)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(mine[:, :12], x[:, :12]) and torch.equal(mine[:, 48:], x[:, 48:])
    assert not torch.equal(mine[:, 12:48], x[:, 12:48])


@pytest.mark.parametrize("fbgemm", [True, False])
@pytest.mark.parametrize("width", [16, 20, 88])
def test_a_gated_product_has_the_bits_of_its_parts(width: int, fbgemm: bool) -> None:
    kernels = CpuKernels(True)
    kernels.fbgemm = kernels.fbgemm and fbgemm
    for bias in (None, random(2 * width)):
        matrix, x = kernels.matrix(random(2 * width, 72), bias), random(5, 72)
        apart = kernels.silu_mul(kernels.linear(x, matrix, prefill=False))
        assert torch.equal(kernels.gated_linear(x, matrix, prefill=False), apart)
        assert torch.equal(kernels.gated_linear(x[3:4], matrix, prefill=False), apart[3:4])


def test_nobody_hears_of_torchs_plans() -> None:
    """It announces once that a constructor will go. Threads pack matrices, and filters of warnings belong to all."""
    child = """
import warnings
import torch
from forerun.kernels.cpu import CpuKernels, pack_for_fbgemm
kernels = CpuKernels(quantize=True)
warnings.simplefilter("error")
warnings.simplefilter = lambda *_: None  # as if another thread had just put its own filters back
if kernels.fbgemm:
    pack_for_fbgemm(torch.ones(4, 8, dtype=torch.int8))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", child], check=True, env=environment)
