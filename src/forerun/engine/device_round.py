"""A whole round on a device: pass, choose, accept, commit and the next drafts in one graph, one host synchronisation.

The host reads what a round gave, starts the next one with the same sequences, and only then turns tokens into text:
that work is hidden behind the device. Rounds whose sequences need more than the device does (processors, other
drafters, rejection) go the general way, `engine/round.py`. So does the one after a round in which the device could not
decide what a filter keeps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter
from forerun.engine.controller import Controller
from forerun.engine.costs import CostTable
from forerun.engine.following import switch_off, tell
from forerun.engine.graphs import LANES, Graphs, Replay, lanes_for
from forerun.engine.lanes import Lanes, Seat
from forerun.engine.probe import RowCounts
from forerun.engine.round import Turn
from forerun.engine.sequence import Sequence, Status
from forerun.errors import ForerunError
from forerun.kernels.interface import LARGEST_TOP_K, WIDEST, Grid
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import Pass
from forerun.sample.row import check_best

REPEATS = 7  # rounds that start before anybody has thought about the last one, when a controller decides


@dataclass(slots=True)
class Flight:
    """A round under way."""

    turns: list[Turn]
    drafts: list[int]  # real drafts in each lane
    width: int
    began: float
    result: Tensor  # [lanes, width + 2] in host memory: chosen tokens, accepted drafts, whether a row was bad
    landed: torch.cuda.Event | None
    repeats: int  # rounds since somebody decided how to run them
    typical: bool  # its time tells what such rounds cost: nothing was compiled or captured for it


class DeviceRounds:
    """Runs rounds of one decoder and its head; everything static is made here."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        graphs: Graphs,
        counts: RowCounts,
        drafters: dict[str, Drafter],
        vocab: int,
        pages: int,
    ) -> None:
        """`pages`: the most a sequence may hold."""
        drafter = drafters.get("mtp")
        self.drafter = drafter if isinstance(drafter, MtpDrafter) else None
        self.head: MtpHead | None = None if self.drafter is None else self.drafter.head
        self.decoder, self.pool, self.graphs, self.counts, self.vocab = decoder, pool, graphs, counts, vocab
        self.lanes = Lanes(LANES[-1], pages, pool, None if self.drafter is None else self.drafter.pool)
        self.flight: Flight | None = None
        self._seats: list[Seat] = []
        self._depth = 0  # drafts the lanes hold
        # by lanes, width, whether the head drafts, whether there are filters
        self.rounds: dict[tuple[int, int, bool, bool], Replay[Tensor]] = {}
        self._undecided = False  # a lane waits for the general way
        self._results = [self._host_result() for _ in range(2)]

    def _host_result(self) -> Tensor:
        result = torch.zeros(LANES[-1] * (WIDEST + 2), dtype=torch.int64)
        return result.pin_memory() if self.pool.device.type == "cuda" else result

    def takes(self, turns: list[Turn]) -> bool:
        """Can all of these run on the device, in a pass of so many rows?"""
        if self._undecided:
            self._undecided = False
            return False
        if len(turns) > LANES[-1] or not all(
            turn.decision.drafter in (None, "mtp") and simple(turn.sequence) for turn in turns
        ):
            return False
        return self.counts.keep_bits(lanes_for(len(turns)) * width_of(turns))

    def launch(self, turns: list[Turn], began: float) -> None:
        """Start a round of these turns. `began`: when deciding on it did."""
        assert self.flight is None
        wanted = [(turn.sequence, len(turn.sequence.cache.pages)) for turn in turns]
        if wanted != [(seat.sequence, seat.pages) for seat in self._seats]:
            self.leave()
            self._seats = [Seat(sequence, pages, self._join(sequence)) for sequence, pages in wanted]
            self._sit_down()
        self._start(turns, width_of(turns), began)

    def _sit_down(self) -> None:
        self.lanes.seat(self._seats)
        self._depth = 0

    def _join(self, sequence: Sequence) -> list[int] | None:
        """Let the head read what was committed, and hold as many slots as the target holds tokens."""
        if self.drafter is None or "mtp" not in sequence.arms:
            return None
        try:
            tell(sequence, self.drafter)
            return self.drafter.join(sequence.id, len(sequence.cache.pages) * self.pool.page)
        except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
            switch_off(sequence, self.drafter, error)
            return None

    def leave(self) -> None:
        """The general way goes on from here: hand the head's caches back."""
        assert self.flight is None
        for seat in self._seats:
            sequence = seat.sequence
            if seat.head_pages is not None and self.drafter is not None and "mtp" in sequence.told:
                tell(sequence, self.drafter)
                self.drafter.leave(sequence.id, sequence.cache.length)
        self._seats = []

    def _start(self, turns: list[Turn], width: int, began: float, repeats: int = 0) -> None:
        lanes = lanes_for(len(turns))
        headed = any(seat.head_pages is not None for seat in self._seats)
        filtered = any(seat.sequence.request.sampling.filtered for seat in self._seats)
        key = (lanes, width, headed, filtered)
        typical = key in self.rounds
        if not typical:
            self._capture(key)
        drafts = [min(width - 1, self._depth) if seat.head_pages is not None else 0 for seat in self._seats]
        if self._depth > width - 1:
            self.lanes.drafted.clamp_(max=width - 1)
        device_result = self.rounds[key]()
        self._results.reverse()
        host = self._results[0][: lanes * (width + 2)].view(lanes, width + 2)
        host.copy_(device_result, non_blocking=True)
        landed = None
        if self.pool.device.type == "cuda":
            landed = torch.cuda.Event(blocking=False)
            landed.record()
        self._depth = width - 1
        self.flight = Flight(turns, drafts, width, began, host, landed, repeats, typical)

    def _capture(self, key: tuple[int, int, bool, bool]) -> None:
        """A capture runs once for nobody: the lanes are cleared for it and seated again."""
        self.lanes.clear()
        self.rounds[key] = self.graphs.capture(lambda: self._round(*key))
        self._sit_down()

    def _round(self, count: int, width: int, headed: bool, filtered: bool) -> Tensor:
        """What a graph holds. Returns [lanes, width + 2]."""
        from forerun.kernels.gpu.committing import accept

        lanes, device = self.lanes, self.pool.device
        pending, position = lanes.pending[:count], lanes.position[:count]
        tokens = torch.cat([pending[None], lanes.drafts[: width - 1, :count]]).T.contiguous()  # [lanes, width]
        before = position.clone()
        states = self.pool.states
        grid = Grid(width, before, lanes.table[:count], lanes.slot[:count], () if states is None else states.layers)
        rows = tokens.flatten()
        output = self.decoder.forward(Pass(rows, rows, grid, self.pool.layers, None, False, features=headed))
        chosen, bad = self._choose(output.logits, count, width, before, filtered)
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        result = torch.empty(count, width + 2, dtype=torch.int64, device=device)
        state = (None, None, None) if states is None else (lanes.slot[:count], states.kept, states.parity)  # type: ignore[union-attr]
        live, drafted = lanes.live[:count], lanes.drafted[:count]
        accept(tokens, chosen, bad, drafted, live, position, accepted, pending, result, *state)
        if headed:
            assert output.features is not None
            self._draft(count, width, output.features, chosen, before, accepted)
        return result

    def _choose(self, logits: Tensor, count: int, width: int, before: Tensor, filtered: bool) -> tuple[Tensor, Tensor]:
        """What plain decoding would emit after each row, and rows that have nothing; both [lanes, width]."""
        from forerun.kernels.gpu.choosing import choose_tokens
        from forerun.kernels.gpu.filtering import find_limits

        lanes, device = self.lanes, self.pool.device

        def of_rows(values: Tensor) -> Tensor:
            return values[:count].repeat_interleave(width, dim=0)

        chosen = torch.empty(count, width, dtype=torch.int64, device=device)
        bad = torch.empty(count, width, dtype=torch.int32, device=device)
        temperature, limits = of_rows(lanes.temperature), None
        if filtered:
            rest = of_rows(lanes.top_k), of_rows(lanes.top_p), of_rows(lanes.min_p_offset)
            limits = find_limits(logits, self.vocab, temperature, *rest)
        places = (before[:, None] + torch.arange(1, width + 1, device=device)).flatten()
        seed = of_rows(lanes.seed)
        choose_tokens(logits, self.vocab, temperature, seed, places, chosen.view(-1), bad.view(-1), limits=limits)
        return chosen, bad

    def _draft(
        self, count: int, width: int, features: Tensor, chosen: Tensor, before: Tensor, accepted: Tensor
    ) -> None:
        """The head reads all rows of the round (rejected ones are overwritten later) and drafts for the next."""
        from forerun.kernels.gpu.choosing import choose_tokens

        head, lanes, drafter = self.head, self.lanes, self.drafter
        assert head is not None and drafter is not None
        pages, table, slot = drafter.pool.layers, lanes.head_table[:count], lanes.slot[:count]
        rows = chosen.flatten()
        grid = Grid(width, before, table, slot)
        outputs = head.forward(head.fuse(features, False), Pass(rows, rows, grid, pages, None, False))
        every = torch.arange(count, device=rows.device)
        last = outputs.view(count, width, -1)[every, accepted.long()]  # [lanes, hidden]
        position, bad = lanes.position[:count], torch.empty(count, dtype=torch.int32, device=rows.device)
        places = lanes.position[:count].long()
        vocab = min(self.vocab, head.output.shape[0])
        for depth in range(width - 1):
            if depth:
                token = lanes.drafts[depth - 1, :count]
                grid = Grid(1, position + (depth - 1), table, slot)
                last = head.forward(last, Pass(token, token, grid, pages, None, False))
            out = lanes.drafts[depth, :count]
            choose_tokens(
                head.logits(last),
                vocab,
                lanes.temperature[:count],
                lanes.seed[:count],
                places + (1 + depth),
                out,
                bad,
                ids=head.vocabulary,
            )
        torch.mul(lanes.headed[:count], width - 1, out=lanes.drafted[:count])

    def land(self, costs: CostTable, again: list[Sequence] | None) -> None:
        """Take in the round under way. `again`: who runs next; when that is the same, the next round starts first."""
        flight = self.flight
        assert flight is not None
        if flight.landed is not None:
            flight.landed.synchronize()
        now = time.perf_counter()
        results = flight.result.tolist()
        self.flight = None
        if again is not None and self._goes_on(flight, results, again):
            self._start(flight.turns, flight.width, now, flight.repeats + 1)
        took = now - flight.began
        rows = len(flight.turns) * flight.width
        decision = flight.turns[0].decision
        if flight.typical:
            costs.learn(decision.drafter, max(flight.drafts), rows, 0.0, took, sequences=len(flight.turns))
        for turn, drafted, line in zip(flight.turns, flight.drafts, results, strict=False):
            if turn.sequence.status is Status.RUNNING:
                accepted = self._take(turn, drafted, line[: flight.width], line[flight.width], bool(line[-1]), took)
                self._undecided |= accepted < 0
                if flight.typical and accepted >= 0:
                    turn.sequence.policy.learn(turn.decision, drafted, accepted, took)

    def _goes_on(self, flight: Flight, results: list[list[int]], running: list[Sequence]) -> bool:
        """Same sequences, none at its end or about to change its mind, and pages for another round."""
        if [turn.sequence for turn in flight.turns] != running:
            return False
        policies = [sequence.policy for sequence in running if isinstance(sequence.policy, Controller)]
        if policies and (flight.repeats >= REPEATS or any(policy.trial for policy in policies)):
            return False
        for turn, line in zip(flight.turns, results, strict=False):
            if line[flight.width] < 0:
                return False
            sequence, tokens = turn.sequence, line[: line[flight.width] + 1]
            room = len(sequence.cache.pages) * self.pool.page
            full = sequence.cache.length + len(tokens) + flight.width > room
            ends = line[-1] or len(tokens) >= sequence.remaining or not sequence.request.stop_ids.isdisjoint(tokens)
            if full or ends:
                return False
        return True

    def _take(self, turn: Turn, drafted: int, chosen: list[int], accepted: int, bad: bool, took: float) -> int:
        """Emit what the device has accepted and committed; returns how many drafts were, −1 if it chose no token."""
        sequence = turn.sequence
        if bad:
            sequence.error = bad_row()
            sequence.finish("error")
            return 0
        emitted = 0
        for token in chosen[: accepted + 1]:
            emitted += 1
            if sequence.emit(token, from_draft=emitted <= accepted):
                break
        sequence.cache.committed(emitted, by_device=accepted + 1)
        if accepted < 0:
            sequence.counters.decode_seconds += took
            return accepted
        accepted = min(accepted, emitted)
        sequence.counters.count(turn.decision.arm, drafted, accepted)
        sequence.counters.spend(took, 0.0)
        return accepted


def width_of(turns: list[Turn]) -> int:
    """Rows of every lane."""
    return 1 + max(turn.decision.depth for turn in turns)


def simple(sequence: Sequence) -> bool:
    """The device changes no logits, and accepts by comparing."""
    params = sequence.request.sampling
    plain = not params.penalised and not len(params.bias_ids) and (params.greedy or params.top_k <= LARGEST_TOP_K)
    return plain and sequence.request.accept == "coupled"


def bad_row() -> ForerunError:
    """What the general way would have said."""
    try:
        check_best(float("nan"), 0)
    except ForerunError as error:
        return error
    raise AssertionError("NaN is never a best logit")
