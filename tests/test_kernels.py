"""Small loops of the CPU's bodies against float64, rows against the same rows alone, and what the probe must see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_bodies import FIRST, OTHERS, kernels_of, random, same_bits
from passes import one_sequence, ragged
from torch import Tensor
from torch.nn import functional as F

from forerun.engine.probe import ProductProbe, cancelling_rows
from forerun.kernels.cpu.machine import Body
from forerun.kernels.interface import Angles, AttentionSpec, HeadLayout, HeadNorms, Joined, LayerPages
from forerun.kernels.matrix import FloatMatrix, Matrix
from forerun.kernels.reference import ReferenceKernels

BODIES = (FIRST, *OTHERS)
WIDTHS = [1, 15, 16, 20, 72, 576]
ROWS = 11


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def check(operation: Callable[..., Tensor], wanted: Tensor, *rows: Tensor, absolute: float = 1e-6) -> None:
    """`operation(kernels, *rows)`: near float64, the same bits on every body, and for every row alone."""
    found = operation(kernels_of(FIRST), *(x.clone() for x in rows))
    torch.testing.assert_close(found.double(), wanted.double(), atol=absolute, rtol=1e-6)
    for body in BODIES:
        assert same_bits(operation(kernels_of(body), *(x.clone() for x in rows)), found), body.name
    for row in range(len(found)):
        alone = operation(kernels_of(FIRST), *(x[row : row + 1].clone() for x in rows))
        assert same_bits(alone, found[row : row + 1])


@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int) -> None:
    x, weight, more = random(ROWS, width) * 8, random(width, seed=2), random(width, seed=3)
    before, other = random(ROWS, width, seed=4), random(ROWS, width, seed=5)
    check(lambda k, x: k.rms_norm(x, weight, 1e-5), norm(x, weight), x)
    added = (before + norm(x, weight)) * 0.7
    then = lambda k, x, before: torch.cat(k.add_norm(x, weight, 1e-5, before, 0.7, (more, weight)), dim=1)  # noqa: E731
    wanted = torch.cat([added, norm(added, more), norm(added, weight)], dim=1)
    check(then, wanted, x, before, absolute=3e-5)  # of small sums normed again
    both = before + norm(norm(x, more) + norm(other, weight), weight)
    join = lambda k, x, before, other: k.add_norm(x, weight, 1e-5, before, 1.0, (), Joined(more, other, weight))[0]  # noqa: E731
    check(join, both, x, before, other, absolute=3e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_activations(width: int) -> None:
    """Far tails of exp included."""
    both = random(ROWS, 2 * width) * 30
    gate, up = both.double().chunk(2, dim=1)
    check(lambda k, x: k.silu_mul(x), F.silu(gate) * up, both)
    check(lambda k, x: k.gelu_mul(x), F.gelu(gate, approximate="tanh") * up, both, absolute=1e-5)
    check(lambda k, x: k.soft_cap(x, 5.0), 5.0 * (both.double() / 5.0).tanh(), both, absolute=3e-6)
    own = both[:, :width] * torch.sigmoid(gate)
    check(lambda k, x: k.sigmoid_gate(x[:, :width], x, 0), own, both)
    shared = both[:, :width] * torch.sigmoid(both[:, -1:])
    check(lambda k, x: k.sigmoid_gate(x[:, :width], x, 2 * width - 1), shared, both)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_are_moved_and_added(width: int) -> None:
    x, other = random(ROWS, width), random(ROWS, width, seed=1)
    check(lambda k, x, other: k.plus(x, other), x + other, x, other, absolute=0.0)
    parts = [x, other, x[:, : width // 2 + 1]]
    check(lambda k, *parts: k.beside(parts), torch.cat(parts, dim=1), *parts, absolute=0.0)
    never = torch.tensor([0, width - 1])
    wanted = x.index_fill(1, never, -torch.inf)
    check(lambda k, x: k.rule_out(x, never), wanted, x, absolute=0.0)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.name)
def test_what_is_no_number_stays_in_its_row(body: Body) -> None:
    kernels, x, weight = kernels_of(body), random(5, 40), random(20)
    clean = kernels.rms_norm(kernels.silu_mul(x), weight, 1e-6)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[2, 25] = bad
        found = kernels.rms_norm(kernels.silu_mul(spoiled), weight, 1e-6)
        assert same_bits(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]]) and found[2].isnan().any()


@pytest.mark.parametrize("shape", [(30, 20), (64, 64), (131, 1000)])
@pytest.mark.parametrize("quantize", [False, True])
def test_the_probe_passes_our_products(quantize: bool, shape: tuple[int, int]) -> None:
    kernels = kernels_of(FIRST, quantize)
    product = ProductProbe(kernels, kernels.matrix(random(*shape), None), torch.device("cpu"), torch.float32)
    assert all(product.keeps_bits(width) for width in (*range(1, 18), 100))


def test_the_probe_sees_a_changed_order_of_summation() -> None:
    """A product that splits K for wide passes, as GEMM libraries do, must not pass."""

    class Splitting(ReferenceKernels):
        def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
            if len(x) < 4:
                return super().linear(x, matrix)
            assert isinstance(matrix, FloatMatrix)
            weight, half = matrix.weight, x.shape[1] // 2
            return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T

    kernels = Splitting()
    matrix = kernels.matrix(random(64, 256), None)
    product = ProductProbe(kernels, matrix, torch.device("cpu"), torch.float32)
    same = {w: product.keeps_bits(w) for w in (2, 3, 4, 8)}
    assert same == {2: True, 3: True, 4: False, 8: False}


@pytest.mark.parametrize("shape", [(88, 72), (960, 576)])
def test_bytes_of_activations_cost_little(shape: tuple[int, int]) -> None:
    """A product in 8 bits is off by about a hundredth; huge pairs that cancel take the rest of their block along."""
    weight, x = random(*shape), random(6, shape[1], seed=1)
    kernels = kernels_of(FIRST)
    exact = x.double() @ weight.double().T
    error = (kernels.linear(x, kernels.matrix(weight, None)).double() - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.015
    assert kernels.linear(cancelling_rows(3, shape[1]), kernels.matrix(weight, None)).isfinite().all()


@pytest.mark.parametrize("kernels", [kernels_of(FIRST), ReferenceKernels()], ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("how", [{}, {"scale": 1.0}, {"scale": 0.5, "softcap": 1.5, "window": 7}])
def test_the_maths_of_attention(kernels: ReferenceKernels, how: dict[str, float]) -> None:
    """Against a softmax written out, alone and in a pass of several, with the keys of a layer that has fewer heads."""
    layer = LayerPages(random(12, 2, 16, 8), random(12, 2, 8, 16, seed=1))
    rows = ragged([5, 4, 1], [6, 25, 0], [[3, 1], [7, 2, 5, 0], [4]])
    queries = HeadLayout(4, 0, 16)
    spec = AttentionSpec(queries, **how)  # type: ignore[arg-type]
    qkv = random(10, queries.width, seed=2)
    before = LayerPages(layer.keys.clone(), layer.values.clone())
    angles = Angles(random(30, 8, seed=8), random(30, 8, seed=9))
    kernels.rotate_and_store(qkv, queries, rows, layer, angles, HeadNorms(random(16), random(16), 1e-6))
    assert torch.equal(layer.keys, before.keys) and torch.equal(layer.values, before.values), "queries store nothing"
    out = kernels.attention(qkv, spec, rows, layer)
    for sequence, start, count in rows.spans():
        here = slice(start, start + count)
        assert torch.equal(kernels.attention(qkv[here], spec, one_sequence(rows, sequence), layer), out[here])
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
