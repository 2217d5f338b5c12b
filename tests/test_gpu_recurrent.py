"""Triton bodies of recurrent layers: they agree with the reference, and rows see neither passes nor neighbours."""

from __future__ import annotations

import random
from dataclasses import dataclass

import passes
import pytest
import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.recurrent import StateSlots
from forerun.kernels.gpu import recurrent
from forerun.kernels.interface import CHUNK_ROWS, Decay, DeltaLayout, PassRows, RowTables
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


@dataclass
class Rows:
    """Rows of a sequence in a pass."""

    slot: int
    sequence: int
    first: int
    count: int
    prompt: bool = False


def tables_of(work: list[Rows], unused: bool) -> RowTables:
    """Where the rows stand in a pass, one piece of work after another; `unused`: with entries without rows, too."""
    turns, chunks, stretches, owners, at, row = [], [], [], [], [], 0
    for owner, mine in enumerate(work):
        if mine.prompt:
            starts = range(0, mine.count, CHUNK_ROWS)
            stretches.append((len(chunks), len(starts), owner))
            chunks += [(row + start, min(CHUNK_ROWS, mine.count - start), owner) for start in starts]
        else:
            turns.append((row, mine.count, owner))
        owners += [owner] * mine.count
        at += range(mine.first, mine.first + mine.count)
        row += mine.count
    if unused:
        empty = [(1, 0, owner) for owner in range(len(work))]
        turns, chunks, stretches = turns + empty, chunks + empty, stretches + empty

    def table(entries: list[tuple[int, int, int]]) -> Tensor:
        return torch.tensor(entries, dtype=torch.int32, device=DEVICE).view(-1, 3)

    numbers = (torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (owners, at))
    return RowTables(*numbers, table(turns), table(chunks), table(stretches))


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
            x = noise(240, self.layout.width + 5, seed=10 + sequence, dtype=self.dtype)
            gates = noise(240, 2 * self.layout.value_heads + 3, seed=20 + sequence, dtype=self.dtype)
            self._inputs[sequence] = x, gates[:, 1:-2]
        x, gates = self._inputs[sequence]
        return x[first : first + count], gates[first : first + count]

    def mix(self, work: list[Rows], unused: bool = False) -> list[Tensor]:
        """A pass with all these rows → their [rows, values]; generated ones are not committed.

        `unused`: with entries of the tables that are not in use, and rows that are nobody's.
        """
        pairs = [self.inputs(rows.sequence, rows.first, rows.count) for rows in work]
        padding = 3 if unused else 0
        gates = torch.nn.functional.pad(torch.cat([gates for _, gates in pairs]), (1, 2, 0, padding))[:, 1:-2]
        x = torch.nn.functional.pad(torch.cat([x for x, _ in pairs]), (0, 0, 0, padding))
        slots = torch.tensor([rows.slot for rows in work], dtype=torch.int32, device=DEVICE)
        rows = PassRows.uniform(1, torch.zeros_like(slots), [], slots)
        rows.tables = tables_of(work, unused)
        out = recurrent.recurrence(x, gates, self.layout, rows, self.layer, self.weight, self.decay)
        return list(out[: len(out) - padding].split([rows.count for rows in work]))

    def run(self, work: list[tuple[int, int, int]], width: int) -> Tensor:
        """As many generated rows of each (slot, sequence, first row) → [slots, width, values]."""
        return torch.stack(self.mix([Rows(*lane, width) for lane in work]))

    def prompt(self, slot: int, sequence: int, first: int, count: int) -> Tensor:
        """Rows of a prompt, alone in a pass: [rows, values]."""
        return self.mix([Rows(slot, sequence, first, count, prompt=True)])[0]

    def contents(self, slot: int) -> list[Tensor]:
        """The state and the inputs before the last generated rows."""
        return [self.layer.state[slot].clone(), self.layer.inputs[slot, : self.layout.window - 1].clone()]

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
        staged = self.slots.stage(0, count, prompt=False)
        rows = passes.recurrent([(0, count)], self.slots.layers, staged, DEVICE)
        mixed = self.kernels.convolve(x, self.layout, rows, 0, self.weight)
        out = self.kernels.delta_rule(mixed, gates, self.layout, rows, 0, self.decay)
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


PROMPTS = [
    pytest.param(HEADS, torch.float32, [70], id="heads"),
    pytest.param(SHORT, torch.float32, [64, 128, 10], id="short window"),
    pytest.param(ONE, torch.float32, [64, 2], id="fewer rows than the window"),
    pytest.param(ONE, torch.bfloat16, [3], id="bfloat16"),
]
if not SLOW:
    PROMPTS += [pytest.param(LARGE, dtype, [64, 128, 10], id=f"large {dtype}") for dtype in CLOSE]


@pytest.mark.parametrize(("layout", "dtype", "counts"), PROMPTS)
def test_prompts_agree_with_the_reference_and_generated_rows_follow(
    layout: DeltaLayout, dtype: torch.dtype, counts: list[int]
) -> None:
    ours, theirs = Recurrence(layout, dtype), Oracle(layout, dtype)
    slot, at = ours.states.take(), 0
    atol, rtol = CLOSE[dtype]
    for count in counts:
        expected = theirs.pass_over(0, at, count, count)
        torch.testing.assert_close(ours.prompt(slot, 0, at, count), expected, atol=atol, rtol=rtol)
        at += count
    if counts[-1] > 16:  # the twin has not recorded its last rows, but counted them
        torch.testing.assert_close(ours.layer.state[slot], theirs.slots.layers[0].state[0], atol=atol, rtol=rtol)
    for width, keep in [(2, 1), (3, 0), (1, 1)]:
        out = ours.run([(slot, 0, at)], width)[0]
        ours.commit(slot, keep)
        torch.testing.assert_close(out, theirs.pass_over(0, at, width, keep), atol=atol, rtol=rtol)
        at += keep


@pytest.mark.parametrize("layout", SPLIT[::3], ids=name)
@pytest.mark.parametrize("dtype", [torch.bfloat16] if SLOW else list(CLOSE))
def test_a_prompt_has_the_same_bits_wherever_it_is_cut_and_whoever_is_beside(
    layout: DeltaLayout, dtype: torch.dtype
) -> None:
    whole, cut = Recurrence(layout, dtype), Recurrence(layout, dtype)
    mine, count = whole.states.take(), 170
    expected = whole.prompt(mine, 0, 0, count)
    other, slot, third = (cut.states.take() for _ in range(3))
    cut.run([(other, 1, 0)], 2)
    cut.commit(other, 1)
    found = []
    for begin, end in [(0, 64), (64, 128), (128, 170)]:
        work = [Rows(slot, 0, begin, end - begin, prompt=True), Rows(other, 1, 1 + begin // 64, 3)]
        work.insert(begin // 64 % 2, Rows(third, 2, begin, end - begin - 3, prompt=True))
        place = [rows.slot for rows in work].index(slot)
        found.append(cut.mix(work, unused=True)[place])
        cut.commit(other, 1)
        assert cut.states.kept[slot] == 0
    assert torch.equal(torch.cat(found), expected)
    assert whole.layer.state[mine].any()
    assert all(torch.equal(a, b) for a, b in zip(whole.contents(mine), cut.contents(slot), strict=True))
    expected = whole.run([(mine, 0, count)], 2)[0]
    after = cut.mix([Rows(third, 2, 0, 5), Rows(slot, 0, count, 2)], unused=True)[1]
    assert torch.equal(after, expected)


def test_generated_rows_see_no_prompts() -> None:
    alone, beside = Recurrence(SHORT), Recurrence(SHORT)
    slot, at = alone.states.take(), 0
    mine, other = beside.states.take(), beside.states.take()
    for turn, (width, keep) in enumerate([(2, 1), (3, 2), (3, 0), (2, 2)]):
        expected = alone.run([(slot, 0, at)], width)[0]
        alone.commit(slot, keep)
        work = [Rows(other, 1, 64 * (turn % 3), 64, prompt=True), Rows(mine, 0, at, width)]
        assert torch.equal(beside.mix(work, unused=True)[1], expected)
        beside.commit(mine, keep)
        at += keep


def test_a_pass_of_which_nothing_is_kept_leaves_the_state_alone() -> None:
    recurrence = Recurrence(SHORT)
    slot = recurrence.states.take()
    recurrence.prompt(slot, 0, 0, 20)
    before = recurrence.contents(slot)
    for first, width in [(20, 3), (31, 2)]:
        recurrence.run([(slot, 0, first)], width)
        recurrence.commit(slot, 0)
        assert all(torch.equal(a, b) for a, b in zip(before, recurrence.contents(slot), strict=True))


@pytest.mark.parametrize("fading", [-20.0, 3.0], ids=["nothing fades", "all fades"])
def test_rows_that_are_all_alike_keep_their_precision(fading: float) -> None:
    """Each key cancels what the one before it wrote; powers of their products would be huge."""
    ours, theirs = Recurrence(SHORT), Oracle(SHORT)
    for recurrence in (ours, theirs):
        x, gates = recurrence.inputs(0, 0, 240)
        x.copy_(x[:1].expand_as(x) + 1e-3 * x)
        gates[:, : SHORT.value_heads] = 6.0
        gates[:, SHORT.value_heads : 2 * SHORT.value_heads] = fading
        recurrence.decay.rate.fill_(-30.0)
        recurrence.decay.bias.fill_(0.0)
    slot = ours.states.take()
    expected = theirs.pass_over(0, 0, 100, 100)
    torch.testing.assert_close(ours.prompt(slot, 0, 0, 100), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.layer.state[slot], theirs.slots.layers[0].state[0], atol=2e-5, rtol=1e-4)


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
        states.stage(other, 4, prompt=True)


def test_a_checkpoint_of_a_prompt_goes_on_in_another_slot() -> None:
    recurrence = Recurrence(SHORT)
    states = recurrence.states
    slot, other = states.take(), states.take()
    recurrence.prompt(slot, 0, 0, 64)
    checkpoint = states.copy(slot, DEVICE)
    state, inputs, record = checkpoint.layers[0]
    assert (state.shape[0], inputs.shape[1], record.numel()) == (2, SHORT.window - 1, 0), "nothing is to be replayed"
    expected = recurrence.prompt(slot, 0, 64, 30), recurrence.run([(slot, 0, 94)], 2)
    recurrence.run([(other, 1, 0)], 5)  # an earlier owner
    recurrence.commit(other, 3)
    states.put(other, checkpoint)
    states.stage(other, 30, prompt=True)
    found = recurrence.prompt(other, 0, 64, 30)
    recurrence.commit(other, 30)
    assert torch.equal(found, expected[0]) and states.kept[other] == 0
    states.stage(other, 2, prompt=False)
    assert torch.equal(recurrence.run([(other, 0, 94)], 2), expected[1])
    recurrence.commit(other, 2)
    assert states.kept[other] == 2


def test_slots_are_counted() -> None:
    states = DeviceStates(SHORT, 2, 3, DEVICE)
    size = DeviceStates.bytes_per_slot(SHORT, 2)
    parts = [part for layer in states.layers for part in (layer.state, layer.inputs, layer.record)]
    assert sum(part.numel() * 4 for part in parts) == 4 * size
    assert (states.free, states.take(), states.take(), states.free, states.unowned) == (3, 0, 1, 1, [2])
