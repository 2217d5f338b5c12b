"""Triton bodies of routing and experts: they agree with the reference, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from forerun.kernels.gpu import experts as module
from forerun.kernels.gpu.experts import experts, grouped_experts, route
from forerun.kernels.interface import Expert
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 2e-2)}


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
@pytest.mark.parametrize("steps", ["one step", "many steps"])
def test_experts_agree_with_the_reference(
    hidden: int, inner: int, top: int, dtype: torch.dtype, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps == "many steps":
        # Steps are written out one behind another, so that hundreds of them would be compiled for minutes.
        monkeypatch.setattr(module, "STEP_IN", max(8, triton.next_power_of_2(hidden) // 8))
        monkeypatch.setattr(module, "STEP_OUT", max(4, triton.next_power_of_2(inner) // 8))
    mixture = Mixture(10, hidden, inner, dtype)
    x = noise(2, hidden, seed=3, dtype=dtype)
    ids, weights = reference_route(noise(2, 10, seed=4), top)
    expected = REFERENCE.experts(x, ids, weights, mixture.each, prefill=False)
    ours = experts(x, ids, weights, mixture.gate_up, mixture.down)
    atol, rtol = CLOSE[dtype]
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("top", [1, 3])
def test_a_prefill_chunk_reads_an_expert_once(top: int) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    mixture = Mixture(10, 24, 16, dtype)
    x = noise(40, 24, seed=3, dtype=dtype)
    ids, weights = route(noise(40, 10, seed=4) - 9 * (torch.arange(10, device=DEVICE) == 4), top)  # nobody wants 4
    assert 4 not in ids and module.can_group(x, mixture.down)
    expected = REFERENCE.experts(x, ids, weights, mixture.each, prefill=False)
    ours = grouped_experts(x, ids, weights, mixture.gate_up, mixture.down)
    atol, rtol = CLOSE[dtype]
    torch.testing.assert_close(ours, expected, atol=atol, rtol=rtol)
    assert not module.can_group(x[:8], mixture.down) and not module.can_group(x, mixture.down[:, :, :15])


@pytest.mark.parametrize(("major", "grouped"), [(8, False), (9, True), (10, True), (12, False)])
def test_groups_only_where_no_host_is_asked(major: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    found = [
        module.groups_natively.__wrapped__(torch.device("cuda"), dtype) for dtype in (torch.bfloat16, torch.float16)
    ]
    assert found == [grouped, False]


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_do_not_see_their_neighbours(dtype: torch.dtype) -> None:
    hidden, inner = (1022, 510) if DEVICE.type == "cuda" else (14, 6)  # rows that start at any address
    mixture = Mixture(5, hidden, inner, dtype)
    x = noise(3, hidden, seed=3, dtype=dtype)
    ids, weights = route(noise(3, 5, seed=4), 2)
    together = experts(x, ids, weights, mixture.gate_up, mixture.down)
    for row in range(3):
        here = slice(row, row + 1)
        assert torch.equal(experts(x[here], ids[here], weights[here], mixture.gate_up, mixture.down), together[here])


def test_experts_that_are_not_chosen_are_not_read() -> None:
    mixture = Mixture(4, 16, 8, torch.float32)
    x, ids, weights = noise(1, 16, seed=3), torch.tensor([[1, 3]], device=DEVICE), torch.ones(1, 2, device=DEVICE)
    expected = experts(x, ids, weights, mixture.gate_up, mixture.down)
    for unused in (0, 2):
        mixture.gate_up[unused] = mixture.down[unused] = float("nan")
    assert torch.equal(experts(x, ids, weights, mixture.gate_up, mixture.down), expected)
    assert expected.isfinite().all()
