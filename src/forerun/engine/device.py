"""Rounds on a device: they run while the host delivers the one before, thinks about the one after and reads prompts.

The host reads one small tensor per round. Drafts of a drafter's device half never leave the device, those of other
drafters are uploaded. What a device cannot decide (rejection sampling, a very wide nucleus) the host decides for that
sequence alone, by passes of its own; it never drags the batch along.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from forerun.draft.arms import ARMS
from forerun.draft.protocol import Drafter
from forerun.engine.batch_slots import BatchSlots, Occupant
from forerun.engine.constrained import constrain
from forerun.engine.drafters import Drafters
from forerun.engine.graphs import BATCH_SIZES, GraphedTarget, batch_size_for
from forerun.engine.host import HostExecutor, failed
from forerun.engine.plan import GoesOn, Result, Round, Turn
from forerun.engine.round_graphs import RoundGraphs, Shape
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError
from forerun.kernels.interface import LARGEST_TOP_K, WIDEST
from forerun.policy.costs import CostTable, RoundTime
from forerun.progress import Progress

UPLOADED = (2, 4, 8, 16)  # widths of rounds whose drafts the host makes; fewer drafts leave rows that nobody looks at
RETURN = 3  # drafts made in a round of another arm, when the device half is to go on afterwards
ASIDE = 4  # rounds that the host decides for a sequence after one the device could not: such text comes in stretches


@dataclass(slots=True)
class Launched:
    """The part of a round that the device runs."""

    turns: list[Turn]
    slots: list[int]  # of each turn
    drafted: list[int]  # real drafts of each
    shape: Shape
    waiting: float = 0.0  # seconds that the device had nothing to do for want of the host's drafts
    drafting: float = 0.0  # seconds the host spent on drafts
    launched_at: float = 0.0
    events: list[torch.cuda.Event] = field(default_factory=list)  # its beginning and its end, on a GPU
    # [slots, width + 2] in host memory: chosen tokens, accepted drafts, whether the first row was bad.
    result: Tensor = field(init=False)

    def seconds(self, now: float) -> float:
        """What it took the device, however late the host looks at it."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else now - self.launched_at


def device_executor(
    target: GraphedTarget, drafters: dict[str, Drafter], vocab: int, costs: CostTable
) -> DeviceExecutor:
    """For a decoder whose passes are replayed from graphs, and its drafters."""
    return DeviceExecutor(target, Drafters(drafters, vocab), costs)


class DeviceExecutor(HostExecutor):
    """Whole rounds as graphs, see `engine/round_graphs.py`; `costs` are those of the rounds that the host runs."""

    runs_ahead = True
    uniform = True

    def __init__(self, target: GraphedTarget, drafters: Drafters, costs: CostTable) -> None:
        pool = target.pool
        super().__init__(target, drafters, CostTable(), restartable=False)
        self.pool, self.device_costs, self.counts = pool, costs, target.counts
        pages = target.tables[0].shape[1]
        self.slots = BatchSlots(BATCH_SIZES[-1], pages, pool, drafters, target.graphs.capture)
        self.half = self.slots.half
        # Drafts that never leave the device; those of the host would make every slot wait for them.
        self.batch_arm = None if self.half is None else self.half.name
        self.rounds = RoundGraphs(target.decoder, self.slots, target.graphs)
        self._aside: dict[int, int] = {}  # sequence → rounds that the host decides for it
        # The results and the times of two rounds: one under way, one that is being delivered.
        cuda = pool.device.type == "cuda"
        room = BATCH_SIZES[-1] * (WIDEST + 2)
        self._results = [torch.zeros(room, dtype=torch.int64, pin_memory=cuda) for _ in range(2)]
        self._events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else [] for _ in range(2)]

    def costs_of(self, sequences: list[Sequence]) -> CostTable:
        """Rounds that the host runs have a table of their own."""
        return self.device_costs if any(map(self._decides_for, sequences)) else self.costs

    def start(self, work: Round) -> None:
        """The device's round first: what the host does then is hidden behind it."""
        ours, rest = self._split(work.turns)
        drafting = self._draft(ours)
        broken = [failed(turn, turn.error) for turn in ours if turn.error is not None]
        ours = [turn for turn in ours if turn.error is None]
        if ours:
            self._launch(work, ours, drafting)
        try:
            self.read_apart(work)
            if rest:
                self.slots.leave(turn.sequence for turn in rest)
                self.run(work, rest, [], work.ended if work.launched or work.read else work.began)
            work.results += broken
        except BaseException as error:
            self._abandon(work.turns, error)
            raise

    def _abandon(self, turns: list[Turn], error: BaseException) -> None:
        """Their round was launched and nobody will look at what it gave: they cannot go on."""
        for turn in turns:
            turn.sequence.fail(ForerunError(f"interrupted in the middle of a round ({error!r})"))
            slot = self.slots.slot_of(turn.sequence)
            if slot is not None:
                self.slots.occupants[slot].stale = True

    def _split(self, turns: list[Turn]) -> tuple[list[Turn], list[Turn]]:
        """Those that the device decides for, and those that the host does."""
        ours = [t for t in turns if self._decides_for(t.sequence) and not self._aside.get(t.sequence.id)]
        if ours and not self.counts.keep_bits(
            batch_size_for(len(ours)) * self._width(ours, [t.decision.depth for t in ours])
        ):
            ours = []  # passes of so many rows change bits: the host runs narrower ones
        mine = set(map(id, ours))
        rest = [turn for turn in turns if id(turn) not in mine]
        for turn in rest:
            left = self._aside.pop(turn.sequence.id, 0)
            if left > 1:
                self._aside[turn.sequence.id] = left - 1
        return ours, rest

    def _decides_for(self, sequence: Sequence) -> bool:
        """Drafts of the device's own half cannot be cut to what a constraint allows, nor masks be made for them."""
        unseen = sequence.constraint is not None and self.half is not None and self.half.name in sequence.arms
        return runs_on_device(sequence) and not unseen

    def _uploads(self, turn: Turn) -> bool:
        """Does the host draft for it?"""
        name = turn.decision.drafter
        return name is not None and (self.half is None or name != self.half.name)

    def _width(self, turns: list[Turn], depths: list[int]) -> int:
        """Rows of every slot, when the turns have so many drafts."""
        widths = [1 + depth for depth in depths]
        for index, turn in enumerate(turns):
            if depths[index] and self._uploads(turn):
                widths[index] = next(width for width in UPLOADED if width > depths[index])
        return max(widths)

    def _draft(self, turns: list[Turn]) -> float:
        """What the host does before a round: drafts and masks. Returns the seconds it took."""
        began = time.perf_counter()
        uploading = [turn for turn in turns if self._uploads(turn)]
        if uploading:
            self.drafters.propose(uploading)
        for turn in turns:
            constrain(turn)
        return time.perf_counter() - began if uploading else 0.0

    def _launch(self, work: Round, turns: list[Turn], drafting: float) -> None:
        uploading = any(map(self._uploads, turns))
        same = not self.slots.changes([turn.sequence for turn in turns])
        slots = self.slots.assign([turn.sequence for turn in turns])
        for turn, slot in zip(turns, slots, strict=True):  # first of all: what is captured must find their tables
            if turn.sequence.constraint is not None:
                self.slots.mask(slot, turn.masks)
        depths = [len(t.draft.tokens) if self._uploads(t) else t.decision.depth for t in turns]
        shape = self._shape(turns, slots, self._width(turns, depths))
        work.typical = shape in self.rounds
        if self.half is not None and shape.followed:
            self.half.before_round(shape.follow, work.typical)
        if not work.typical:
            self.rounds.capture(shape)
        drafted = self._hand_out_drafts(turns, slots, shape)
        # The device had nothing to do meanwhile. Whoever joins makes any round wait.
        waiting = (time.perf_counter() - work.began if same else drafting) if uploading else 0.0
        work.launched = self._launch_graphs(Launched(turns, slots, drafted, shape, waiting, drafting))

    def _launch_again(self, last: Launched, now: float) -> Round:
        """As the last round, with nothing in between that the device would wait for."""
        shape, occupants = last.shape, self.slots.occupants
        if self.half is not None and shape.followed:
            self.half.before_round(shape.follow, True)
        drafted = [min(shape.width - 1, occupants[slot].held) for slot in last.slots]
        launched = self._launch_graphs(Launched(last.turns, last.slots, drafted, shape))
        return Round(last.turns, [], now, launched=launched)

    def _launch_graphs(self, launched: Launched) -> Launched:
        shape = launched.shape
        self._events.reverse()
        launched.launched_at, launched.events = time.perf_counter(), self._events[0]
        try:
            if launched.events:
                launched.events[0].record()
            device_result = self.rounds.launch(shape)
            self._results.reverse()
            host = self._results[0][: shape.slots * (shape.width + 2)].view(shape.slots, shape.width + 2)
            launched.result = host.copy_(device_result, non_blocking=True)
            if launched.events:
                launched.events[1].record()
        except BaseException as error:
            self._abandon(launched.turns, error)
            raise
        for slot in launched.slots:
            follows = self.half is not None and self.half.follows(slot)
            self.slots.occupants[slot].held = shape.drafts if follows else 0
        if self.half is not None and shape.followed:
            self.half.launched(shape.follow)
        return launched

    def _shape(self, turns: list[Turn], slots: list[int], width: int) -> Shape:
        params = [turn.sequence.request.sampling for turn in turns]
        count = batch_size_for(self.slots.in_use)
        if not self.counts.keep_bits(count * width):
            width = self._width(turns, [turn.decision.depth for turn in turns])
        followed = self.half is not None and any(self.half.follows(slot) for slot in slots)
        edited = any(p.needs_edits for p in params) or any(turn.masks is not None for turn in turns)
        shape = Shape(count, width, followed, any(p.filtered for p in params), edited, drafts=0)
        return shape._replace(drafts=self._wanted(turns, shape)) if followed else shape

    def _wanted(self, turns: list[Turn], shape: Shape) -> int:
        """Drafts for the next round: for a turn of the device half, or for a sequence that only tries another arm."""
        assert self.half is not None
        if any(turn.decision.drafter == self.half.name for turn in turns):
            return RETURN if any(map(self._uploads, turns)) else shape.width - 1
        returns = any(t.sequence.policy.current.drafter == self.half.name and not t.shared for t in turns)
        measured = all(turn.sequence.policy.measures for turn in turns)
        return RETURN if returns and measured and shape._replace(drafts=RETURN) in self.rounds else 0

    def _hand_out_drafts(self, turns: list[Turn], slots: list[int], shape: Shape) -> list[int]:
        """Those of the host, and none where the device's would not find room. Returns how many each turn has."""
        given: dict[int, list[int]] = {}
        drafted = []
        for turn, slot in zip(turns, slots, strict=True):
            occupant = self.slots.occupants[slot]
            held = min(shape.width - 1, occupant.held)
            if self._uploads(turn):
                given[slot] = turn.draft.tokens
                held = len(turn.draft.tokens)
            elif held and turn.sequence.cache.length + 1 + held > occupant.pages * self.pool.page:
                given[slot], held = [], 0
            drafted.append(held)
        if any(occupant.held > shape.width - 1 for occupant in self.slots.occupants.values()):
            self.slots.drafted.clamp_(max=shape.width - 1)
        self.slots.give(given)
        return drafted

    def finish(self, work: Round, again: GoesOn | None) -> None:
        """Wait for the device, start the same turns again where they go on, then look at what came."""
        launched = work.launched
        if launched is None:
            return
        # Whoever was interrupted here comes again, and may have started them already.
        if work.again or work.results or work.read or not self._may_repeat(launched):
            again = None
        if launched.events:
            launched.events[1].synchronize()
        now, width, lines = time.perf_counter(), launched.shape.width, launched.result.tolist()
        lines = [lines[slot] for slot in launched.slots]
        if again is not None and all(self._goes_on(launched, index, line, again) for index, line in enumerate(lines)):
            work.again = self._launch_again(launched, now)
        results = []
        for turn, slot, drafted, line in zip(launched.turns, launched.slots, launched.drafted, lines, strict=True):
            accepted, keep = line[width], partial(self._keep_rows, self.slots.occupants[slot], line[width] + 1)
            result = Result(turn, line[: accepted + 1], accepted, drafted + turn.cut, keep, advanced=True)
            if line[-1]:
                result.error = bad_row(turn.sequence.request.sampling.needs_edits or turn.masks is not None)
            elif accepted < 0:
                self._aside[turn.sequence.id] = ASIDE
            results.append(result)
        self._account(launched, results, work, now)
        found = {id(result.turn): result for result in (*results, *work.results)}
        work.results = [found[id(turn)] for turn in work.turns]
        work.ended = now

    def _may_repeat(self, launched: Launched) -> bool:
        """Nothing to capture or to upload, every slot where the host is."""
        if any(self._uploads(turn) or turn.sequence.constraint is not None for turn in launched.turns):
            return False
        if any(self.slots.occupants[slot].stale for slot in launched.slots):
            return False
        return self.half is None or not launched.shape.followed or self.half.may_repeat(launched.shape.follow)

    def _goes_on(self, launched: Launched, index: int, line: list[int], again: GoesOn) -> bool:
        """A token was decided on, there are pages for another round, and nobody wants anything else."""
        width, turn = launched.shape.width, launched.turns[index]
        accepted = line[width]
        if accepted < 0 or line[-1]:
            return False
        room = self.slots.occupants[launched.slots[index]].pages * self.pool.page
        if turn.sequence.cache.length + accepted + 1 + width > room:
            return False
        return again(index, turn, line[: accepted + 1], launched.drafted[index])

    def _account(self, launched: Launched, results: list[Result], work: Round, now: float) -> None:
        """What the round took, and what that tells."""
        alone, count = launched.seconds(now), len(launched.turns)
        for result in results:
            result.took, result.drafting = now - work.began, launched.drafting
            result.seconds = alone + (launched.waiting if self._uploads(result.turn) else 0.0)
        measured = RoundTime(count, count * launched.shape.width, alone)
        if count == 1:
            measured.drafter, measured.drafted = launched.turns[0].decision.drafter, launched.drafted[0]
            measured.drafting = launched.waiting
        if launched.shape.drafts and self.half is not None:
            measured.inside = (self.half.name, launched.shape.drafts)
        if work.typical:
            work.times.append((self.device_costs, measured))

    def _keep_rows(self, occupant: Occupant, by_device: int, count: int) -> None:
        """The device has kept them by itself; where the host dropped some, the slot is not where it is."""
        occupant.sequence.cache.committed(count, by_device=by_device)
        occupant.stale |= count != by_device

    def prepare(self, widest: int, filtered: bool, progress: Progress, batch: int = 1) -> list[RoundTime]:
        """Capture what one sequence may want and is not there, so that no answer waits; and time it.

        `batch`: what batches of up to so many want is captured too.
        """
        if not self.rounds.graphs.real:
            return []
        self.slots.assign([])
        half = self.half
        shapes = [Shape(1, width, half is not None, filtered, False, drafts=0) for width in (1, *UPLOADED)]
        if half is not None:
            deepest = ARMS[half.name].deepest
            shapes += [Shape(1, 1 + depth, True, filtered, False, drafts=depth) for depth in range(1, deepest + 1)]
            shapes += [Shape(1, width, True, filtered, False, drafts=RETURN) for width in (1, 2, 8, 16)]
        for count in BATCH_SIZES[1:] if batch > 1 else ():
            if count <= batch_size_for(batch):
                shapes.append(Shape(count, 1, False, filtered, False, drafts=0))
                if half is not None:
                    depth = ARMS[half.name].first_depth
                    shapes += [Shape(count, 1 + d, True, filtered, False, drafts=d) for d in (0, depth)]
        shapes = [shape for shape in shapes if shape.width <= widest and shape not in self.rounds]
        missing = [shape for shape in dict.fromkeys(shapes) if self.counts.keep_bits(shape.rows)]
        found = []
        if missing:
            with progress.task("capturing rounds", len(missing)) as task:
                for shape in missing:
                    self.rounds.capture(shape)
                    inside = (half.name, shape.drafts) if half is not None and shape.drafts else None
                    if shape.slots == 1:
                        found.append(RoundTime(1, shape.width, self.rounds.seconds(shape), inside=inside))
                    task.advance()
            if half is not None:
                half.prepare(1)
        return found

    def forget(self, sequence: Sequence) -> None:
        """Its slot is free."""
        self._aside.pop(sequence.id, None)
        self.slots.leave([sequence])


def runs_on_device(sequence: Sequence) -> bool:
    """The device compares, filters the best tokens only, and keeps logits to itself."""
    request, params = sequence.request, sequence.request.sampling
    plain = request.accept == "coupled" and request.logprobs is None
    return plain and (params.greedy or params.top_k <= LARGEST_TOP_K)


def bad_row(edited: bool) -> ForerunError:
    """What the host would have said; where logits were edited, the device does not know which of the two it was."""
    broken = "the model gave a logit that is infinite or not a number: try --dtype float32"
    if edited:
        broken = f"every token is ruled out (loosen suppress, logit_bias, lang_bias or the grammar), or {broken}"
    return ForerunError(broken)
