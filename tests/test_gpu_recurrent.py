"""Triton bodies of recurrent layers: they agree with the reference, and rows see neither passes nor neighbours."""

from __future__ import annotations

import random

import passes
import pytest
import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.recurrent import StateSlots
from forerun.kernels.gpu import recurrent, recurrent_prefill
from forerun.kernels.interface import Decay, DeltaLayout, PassRows
from forerun.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = DEVICE.type == "cpu"  # Triton's interpreter
SEEDS = range(2 if SLOW else 40)
HEADS = DeltaLayout(key_heads=3, value_heads=6, key_size=24, value_size=20, window=4)
BLOCKS = DeltaLayout(key_heads=1, value_heads=1, key_size=128, value_size=20, window=4)  # columns in two programs
SHORT = DeltaLayout(key_heads=1, value_heads=2, key_size=16, value_size=16, window=2)
ONE = DeltaLayout(key_heads=1, value_heads=1, key_size=16, value_size=12, window=6)
LARGE = DeltaLayout(key_heads=16, value_heads=32, key_size=128, value_size=128, window=4)
SPLIT = [SHORT, BLOCKS] if SLOW else [SHORT, BLOCKS, HEADS, LARGE]
CLOSE = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2)}


def name(layout: DeltaLayout) -> str:
    return f"{layout.value_heads} heads of {layout.key_size} x {layout.value_size}"


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Recurrence:
    """One recurrent layer with random weights, the state of three sequences in it, and their endless inputs."""

    def __init__(self, layout: DeltaLayout, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.dtype = layout, dtype
        self.states = DeviceStates(layout, 2, 3, DEVICE)
        self.layer = self.states.layers[1]
        self.decay = Decay(-noise(layout.value_heads, seed=1).exp(), noise(layout.value_heads, seed=2))
        self.weight = noise(layout.window, layout.width, seed=3)
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def inputs(self, sequence: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Projected rows with columns after the convolved ones, and gates with columns around them."""
        if sequence not in self._inputs:
            x = noise(120, self.layout.width + 5, seed=10 + sequence, dtype=self.dtype)
            gates = noise(120, 2 * self.layout.value_heads + 3, seed=20 + sequence, dtype=self.dtype)
            self._inputs[sequence] = x, gates[:, 1:-2]
        x, gates = self._inputs[sequence]
        return x[first : first + count], gates[first : first + count]

    def run(self, work: list[tuple[int, int, int]], width: int) -> Tensor:
        """Lanes (slot, sequence, first row) of a decode pass → [lanes, width, values]; nothing is committed."""
        pairs = [self.inputs(sequence, first, width) for _, sequence, first in work]
        wide = torch.cat([torch.nn.functional.pad(gates, (1, 2)) for _, gates in pairs])[:, 1:-2]
        x = torch.cat([x for x, _ in pairs])
        slots = torch.tensor([slot for slot, _, _ in work], dtype=torch.int32, device=DEVICE)
        rows = PassRows.uniform(width, torch.zeros_like(slots), [], slots)
        out = recurrent.recurrence(x, wide, self.layout, rows, self.layer, self.weight, self.decay)
        return out.unflatten(0, (len(work), width))

    def commit(self, slot: int, count: int) -> None:
        self.states.commit(slot, None, count)


class Oracle(Recurrence):
    """The same layer in the reference bodies."""

    def __init__(self, layout: DeltaLayout, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(layout, dtype)
        self.kernels, self.slots = ReferenceKernels(), StateSlots(layout, 1, 1, DEVICE)
        self.slots.take()

    def pass_over(self, sequence: int, first: int, count: int, keep: int) -> Tensor:
        x, gates = self.inputs(sequence, first, count)
        staged = self.slots.stage(0, count, prefill=False)
        rows = passes.recurrent([(0, count)], self.slots.layers, staged, DEVICE)
        mixed = self.kernels.convolve(x, self.layout, rows, 0, self.weight)
        out = self.kernels.delta_rule(mixed, gates, self.layout, rows, 0, self.decay, prefill=False)
        self.slots.commit(0, staged, keep)
        return out


PASSES = [
    pytest.param(HEADS, torch.float32, [(2, 1), (2, 2)], id="heads"),
    pytest.param(BLOCKS, torch.float32, [(1, 1), (3, 2), (2, 0), (1, 1)], id="blocks"),
    pytest.param(SHORT, torch.float32, [(1, 1), (3, 2), (2, 0), (1, 1)], id="short window"),
    pytest.param(SHORT, torch.bfloat16, [(3, 2), (2, 1)], id="bfloat16"),
    pytest.param(ONE, torch.float32, [(16, 16), (16, 1), (1, 1)], id="full record"),
]
if not SLOW:
    PASSES += [pytest.param(LARGE, dtype, [(5, 3), (1, 1), (16, 16), (2, 1)], id=f"large {dtype}") for dtype in CLOSE]


@pytest.mark.parametrize(("layout", "dtype", "passes"), PASSES)
def test_the_recurrence_agrees_with_the_reference(
    layout: DeltaLayout, dtype: torch.dtype, passes: list[tuple[int, int]]
) -> None:
    ours, theirs = Recurrence(layout, dtype), Oracle(layout, dtype)
    slot, at = ours.states.take(), 0
    for width, keep in passes:
        out = ours.run([(slot, 0, at)], width)[0]
        ours.commit(slot, keep)
        atol, rtol = CLOSE[dtype]
        torch.testing.assert_close(out, theirs.pass_over(0, at, width, keep), atol=atol, rtol=rtol)
        at += keep


@pytest.mark.parametrize("layout", SPLIT, ids=name)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_split_and_any_rollback_gives_the_same_bits(layout: DeltaLayout, seed: int) -> None:
    """Kept rows come out as one by one, whatever was written and dropped; the state after them is the same too."""
    chance = random.Random(seed)
    dtype = torch.bfloat16 if seed % 2 else torch.float32
    alone, mixed = Recurrence(layout, dtype), Recurrence(layout, dtype)
    place, slot, at = alone.states.take(), mixed.states.take(), 0
    for _ in range(3 if SLOW else 6):
        width = chance.choice([1, 2, 4] if SLOW else [1, 2, 3, 5, 16])
        keep = chance.randint(0, width)
        out = mixed.run([(slot, 0, at)], width)[0]
        mixed.commit(slot, keep)
        for row in range(keep):
            expected = alone.run([(place, 0, at + row)], 1)[0]
            alone.commit(place, 1)
            assert torch.equal(out[row], expected[0])
        at += keep
    for recurrence, where in ((alone, place), (mixed, slot)):
        recurrence.run([(where, 0, at)], 1)  # replays what is kept
    past = layout.window - 1
    assert torch.equal(alone.layer.state[place], mixed.layer.state[slot])
    assert torch.equal(alone.layer.inputs[place, :past], mixed.layer.inputs[slot, :past])
    assert at == 0 or alone.layer.state[place].any()


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("layout", SPLIT[::3], ids=name)
def test_neighbours_and_idle_lanes_leave_no_trace(layout: DeltaLayout, place: int) -> None:
    alone, beside = Recurrence(layout), Recurrence(layout)
    slot = alone.states.take()
    lanes = [beside.states.take() for _ in range(3)][::-1]
    at = 0
    for width, keep in [(2, 1), (3, 2)]:
        expected = alone.run([(slot, 0, at)], width)[0]
        alone.commit(slot, keep)
        work = [(lane, number, at) for number, lane in enumerate(lanes[1:], start=1)]
        work.insert(place, (lanes[0], 0, at))
        idle = beside.states.count
        assert torch.equal(beside.run([*work, (idle, 1, 0), (idle, 2, 0)], width)[place], expected)
        for lane in lanes:
            beside.commit(lane, keep if lane == lanes[0] else width - 1)
        at += keep


def test_only_the_slot_of_a_pass_changes() -> None:
    recurrence = Recurrence(SHORT)
    mine, other = recurrence.states.take(), recurrence.states.take()
    for slot in (mine, other):
        recurrence.run([(slot, slot, 0)], 2)
        recurrence.commit(slot, 2)
    before = recurrence.states.copy(other, DEVICE)
    recurrence.run([(mine, 0, 2)], 3)
    recurrence.commit(mine, 1)
    after = recurrence.states.copy(other, DEVICE)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert torch.equal(before.kept, after.kept)
    assert not recurrence.states.layers[0].state.any(), "the other layer was not run"


def prefill(recurrence: Recurrence, slot: int, first: int, count: int, keep: bool = True) -> Tensor:
    x, gates = recurrence.inputs(0, first, count)
    staged = recurrence.states.stage(slot, count, prefill=True)
    assert staged is not None
    rows = passes.recurrent([(slot, count)], recurrence.states.layers, staged, DEVICE)
    mixed = recurrent_prefill.convolve(x, recurrence.layout, rows, 1, recurrence.weight)
    out = recurrent_prefill.delta_rule(mixed, gates, recurrence.layout, rows, 1, recurrence.decay)
    staged.state[0], staged.inputs[0] = 0, 0  # the layer that does not run
    recurrence.states.commit(slot, staged, count if keep else 0)
    return out


@pytest.mark.parametrize("layout", [HEADS, SHORT], ids=["heads", "short window"])
def test_prefill_agrees_with_the_reference_and_decoding_goes_on(layout: DeltaLayout) -> None:
    ours, theirs = Recurrence(layout), Oracle(layout)
    slot, at = ours.states.take(), 0
    for count in (70, 1, 2):
        prefill(ours, slot, 3, count, keep=False)  # an interrupted chunk counts for nothing
        expected = theirs.pass_over(0, at, count, count)
        torch.testing.assert_close(prefill(ours, slot, at, count), expected, atol=2e-5, rtol=1e-4)
        at += count
    for width, keep in [(2, 1), (1, 1)]:
        out = ours.run([(slot, 0, at)], width)[0]
        ours.commit(slot, keep)
        torch.testing.assert_close(out, theirs.pass_over(0, at, width, keep), atol=2e-5, rtol=1e-4)
        at += keep


def test_a_slot_comes_back_from_host_memory_elsewhere() -> None:
    recurrence = Recurrence(SHORT)
    states = recurrence.states
    slot = states.take()
    recurrence.run([(slot, 0, 0)], 5)
    recurrence.commit(slot, 3)
    parked = states.copy(slot, torch.device("cpu"))
    expected = recurrence.run([(slot, 0, 3)], 2)
    states.give_back(slot)
    assert states.take() == slot and not states.layers[1].state[slot].any() and not states.kept.any()
    other = states.take()
    states.put(other, parked)
    assert torch.equal(recurrence.run([(other, 0, 3)], 2), expected)
    with pytest.raises(AssertionError, match="nothing is left to replay"):
        states.stage(other, 4, prefill=True)
    assert states.stage(slot, 4, prefill=True) is not None


def test_slots_are_counted() -> None:
    states = DeviceStates(SHORT, 2, 3, DEVICE)
    size = DeviceStates.bytes_per_slot(SHORT, 2)
    parts = [part for layer in states.layers for part in (layer.state, layer.inputs, layer.record)]
    assert sum(part.numel() * 4 for part in parts) == 4 * size
    assert (states.free, states.take(), states.take(), states.free, states.unowned) == (3, 0, 1, 1, [2])
