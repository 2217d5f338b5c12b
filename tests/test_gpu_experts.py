"""Triton bodies of routing and experts: they agree with the reference, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.engine.probe import cancelling_rows
from forerun.kernels.gpu import experts as module
from forerun.kernels.gpu.experts import Cut, experts, route, row_tile
from forerun.kernels.interface import Activation, Expert
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
TYPES = [torch.float32, torch.bfloat16]
# The interpreter cuts numbers to bfloat16 where a GPU rounds them.
CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2) if DEVICE.type == "cuda" else (5e-2, 5e-2)}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference_route(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """In ascending order of ids."""
    ids, weights = REFERENCE.route(logits, top)
    ids, order = ids.sort(dim=1)
    return ids, weights.gather(1, order)


@pytest.mark.parametrize(("count", "top"), [(6, 3), (16, 1), (5, 5), (257, 8)])
@pytest.mark.parametrize("dtype", TYPES)
def test_routing_agrees_with_the_reference(count: int, top: int, dtype: torch.dtype) -> None:
    logits = noise(2, count + 2, seed=1, dtype=dtype)[:, 1:-1]
    ids, weights = route(logits, top)
    expected, shares = reference_route(logits, top)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, shares)
    for row in range(2):
        alone = route(logits[row : row + 1].clone(), top)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])
    scale = 1 + noise(count, seed=2).abs()
    same, scaled = route(logits, top, scale)
    assert torch.equal(same, ids)
    torch.testing.assert_close(scaled, weights * scale[ids])
    other, right = REFERENCE.route(logits, top, scale)
    torch.testing.assert_close(scaled, right.gather(1, other.argsort(dim=1)))


def test_routing_breaks_ties_by_number() -> None:
    low = float("-inf")
    rows = [[0.5, 2, 2, -1, 2], [3, 3, 3, 3, 3], [low, low, 1, low, low], [0, -0.0, 0, 1, 0]]
    logits = torch.tensor(rows, device=DEVICE)
    ids, weights = route(logits, 3)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], [0, 1, 3]]
    torch.testing.assert_close(weights, logits.gather(1, ids).softmax(-1))


def test_a_row_that_is_not_a_number_goes_to_experts_that_exist() -> None:
    logits = torch.full((1, 5), float("nan"), device=DEVICE)
    logits[0, 1] = 1
    ids, _ = route(logits, 3)
    assert len(set(ids[0].tolist())) == 3 and set(ids[0].tolist()) <= set(range(5))


class Mixture:
    """Random experts, stacked."""

    def __init__(self, count: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        self.gate_up = noise(count, 2 * inner, hidden, seed=1, dtype=dtype) * hidden**-0.5
        self.down = noise(count, hidden, inner, seed=2, dtype=dtype) * inner**-0.5
        self.each = [
            Expert(REFERENCE.matrix(a, None), REFERENCE.matrix(b, None))
            for a, b in zip(self.gate_up, self.down, strict=True)
        ]


SHAPES = [(24, 20, 3), (18, 7, 1)]  # hidden, inner, top
if DEVICE.type == "cuda":
    SHAPES += [(2048, 512, 8), (1030, 515, 2)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("hidden", "inner", "top"), SHAPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_experts_agree_with_the_reference(
    hidden: int, inner: int, top: int, dtype: torch.dtype, activation: Activation, rows: int
) -> None:
    mixture = Mixture(10, hidden, inner, dtype)
    x = noise(rows, hidden, seed=3, dtype=dtype)
    unwanted = 9 * (torch.arange(10, device=DEVICE) == 4)  # no row goes to expert 4
    ids, weights = reference_route(noise(rows, 10, seed=4) - unwanted, top)
    expected = REFERENCE.experts(x, ids, weights, mixture.each, activation=activation)
    ours = experts(x, ids, weights, mixture.gate_up, mixture.down, activation)
    atol, rtol = CLOSE[dtype]
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)


def cancelling_mixture(count: int, hidden: int, inner: int) -> Mixture:
    """Inner values cancel each other as well: the second half of the columns is the first, turned round by `down`."""
    mixture = Mixture(count, hidden, inner, torch.bfloat16)
    mixture.down[:, :, inner // 2 : inner // 2 * 2] = -mixture.down[:, :, : inner // 2]
    return mixture


def choices(rows: int, count: int, top: int, kind: str) -> tuple[Tensor, Tensor]:
    """All rows want the same experts, or every row others."""
    logits = noise(rows, count, seed=4)
    return route(logits if kind == "others" else logits[:1].expand(rows, count).contiguous(), top)


@pytest.mark.parametrize("kind", ["others", "the same"])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_rows_keep_their_bits_in_every_tile(tile: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps, odd sizes, tiles that are full and tiles that are not."""
    small = dict.fromkeys((1, 16, 32, 64, 128), Cut(16, 32, 4, 3))
    monkeypatch.setattr(module, "ENTERING", small)
    monkeypatch.setattr(module, "LEAVING", small)
    hidden, inner, count, top, rows = 70, 38, 5, 2, 45
    mixture = cancelling_mixture(count, hidden, inner)
    x = (cancelling_rows(rows, hidden) / 64).to(DEVICE, torch.bfloat16)
    ids, weights = choices(rows, count, top, kind)
    weight = mixture.gate_up, mixture.down
    alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], *weight) for i in range(rows)])
    monkeypatch.setattr(module, "TILES", ((tile, float("inf")),))
    for first, end in ((0, rows), (0, 2), (3, 20), (40, rows)):
        got = experts(x[first:end], ids[first:end], weights[first:end], *weight)
        assert torch.equal(got, alone[first:end])


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_do_not_see_their_neighbours(dtype: torch.dtype) -> None:
    hidden, inner = (1022, 510) if DEVICE.type == "cuda" else (14, 6)  # rows that start at any address
    mixture = Mixture(5, hidden, inner, dtype)
    x = noise(20, hidden, seed=3, dtype=dtype)
    ids, weights = route(noise(20, 5, seed=4), 2)
    together = experts(x, ids, weights, mixture.gate_up, mixture.down)
    for row in range(20):
        here = slice(row, row + 1)
        assert torch.equal(experts(x[here], ids[here], weights[here], mixture.gate_up, mixture.down), together[here])
    x[3:] = float("nan")  # rows that pad a pass may hold anything
    assert torch.equal(experts(x, ids, weights, mixture.gate_up, mixture.down)[:3], together[:3])


@pytest.mark.parametrize("looked_at", [8, 32, 64])
def test_pairs_of_an_expert_are_gathered_in_order(looked_at: int) -> None:
    rows, top, count = 21, 3, 6
    ids, _ = route(noise(rows, count, seed=4) - 9 * (torch.arange(count, device=DEVICE) == 2), top)
    owned = torch.full((count, rows), -1, dtype=torch.int32, device=DEVICE)
    sizes = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    module._gather[(count,)](ids, owned, sizes, rows, TOP=top, BLOCK=looked_at)
    for expert in range(count):
        expected = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert owned[expert].tolist() == expected + [-1] * (rows - len(expected)) and sizes[expert] == len(expected)
    assert sizes[2] == 0


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    few, wide = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    assert [row_tile(rows, 8, 256, wide) for rows in (1, 2, 64, 512, 2048, 8192)] == [1, 16, 16, 32, 64, 128]
    assert [row_tile(rows, 8, 256, few) for rows in (1, 2, 8192)] == [1, 16, 16]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a real shape, in the format of models")
def test_a_real_mixture_keeps_bits() -> None:
    hidden, inner, count, top, rows = 2048, 512, 64, 8, 1100
    mixture = cancelling_mixture(count, hidden, inner)
    x = cancelling_rows(rows, hidden).to(DEVICE, torch.bfloat16)
    ids, weights = choices(rows, count, top, "others")
    weight = mixture.gate_up, mixture.down
    alone = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], *weight) for i in range(rows)])
    for count in (2, 8, 64, 200, 500, rows):
        assert torch.equal(experts(x[:count], ids[:count], weights[:count], *weight), alone[:count])


def test_experts_that_are_not_chosen_are_not_read() -> None:
    mixture = Mixture(4, 16, 8, torch.float32)
    x, ids, weights = noise(1, 16, seed=3), torch.tensor([[1, 3]], device=DEVICE), torch.ones(1, 2, device=DEVICE)
    expected = experts(x, ids, weights, mixture.gate_up, mixture.down)
    for unused in (0, 2):
        mixture.gate_up[unused] = mixture.down[unused] = float("nan")
    assert torch.equal(experts(x, ids, weights, mixture.gate_up, mixture.down), expected)
    assert expected.isfinite().all()
