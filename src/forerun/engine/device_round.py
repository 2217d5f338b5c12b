"""A whole round on a device: pass, choose, accept, commit and the next drafts in one graph, one host synchronisation.

The host reads what a round gave, starts the next one with the same sequences, and only then turns tokens into text and
thinks about what to do after it: that work is hidden behind the device. Drafts of the head never leave the device,
those of other drafters are uploaded. Rounds whose sequences need more than the device does (processors, rejection) go
the general way, `engine/round.py`. So do a few after one in which the device could not decide what a filter keeps.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter
from forerun.engine.controller import Controller
from forerun.engine.costs import CostTable
from forerun.engine.flight import (
    UPLOADED,
    Flight,
    Shape,
    bad_row,
    learn_costs,
    runs_on_device,
    tries,
    uploads,
    width_of,
)
from forerun.engine.following import switch_off, tell
from forerun.engine.graphs import LANES, Graphs, Replay, lanes_for
from forerun.engine.lanes import Lanes, Seat
from forerun.engine.probe import RowCounts
from forerun.engine.round import Turn
from forerun.engine.sequence import Sequence, Status
from forerun.engine.unread import RING, Unread
from forerun.kernels.interface import WIDEST, PassRows
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import Pass
from forerun.progress import Progress

RETURN = 3  # drafts that the head makes in a round of another arm, when it is to go on afterwards
ASIDE = 4  # rounds that go the general way after one that could not decide: text like that comes in stretches


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
        self.unread: Unread | None = None
        if self.drafter is not None:
            self.unread = Unread(self.lanes, self.drafter, graphs, decoder.dtype)
        self.flight: Flight | None = None
        self._seats: list[Seat] = []
        self._depth = 0  # drafts the lanes hold
        self.rounds: dict[Shape, Replay[Tensor]] = {}
        self._stale = False  # the lanes are not where the host is: it dropped tokens, or somebody interrupted
        self._aside = 0  # rounds that go the general way, because a lane could not decide
        self._unhidden = 0.0  # seconds of work after the last round, while the device had none
        self._results = [self._host_result() for _ in range(2)]

    def _host_result(self) -> Tensor:
        result = torch.zeros(LANES[-1] * (WIDEST + 2), dtype=torch.int64)
        return result.pin_memory() if self.pool.device.type == "cuda" else result

    def prepare(self, deepest: int, widest: int, filtered: bool, progress: Progress) -> list[tuple[Shape, float]]:
        """Capture what `auto` may want for one sequence and is not there, so that no answer waits; and time it."""
        assert self.flight is None
        self.leave()
        headed = self.head is not None
        shapes = [Shape(1, width, headed, filtered, drafts=0) for width in (1, *UPLOADED)]
        if headed:
            shapes += [Shape(1, 1 + depth, headed, filtered, drafts=depth) for depth in range(1, deepest + 1)]
            shapes += [Shape(1, width, headed, filtered, drafts=RETURN) for width in (1, 2, 8, 16)]
        shapes = [shape for shape in shapes if shape.width <= widest and shape not in self.rounds]
        missing = [shape for shape in shapes if self.counts.keep_bits(shape.rows)]
        found = []
        if missing:
            with progress.task("capturing rounds", len(missing)) as task:
                for shape in missing:
                    self._capture(shape)
                    found.append((shape, self._seconds(self.rounds[shape])))
                    task.advance()
            if self.unread is not None:
                self.unread.clear()  # of the rounds for nobody
                self.unread.prepare(1)
        return found

    def _seconds(self, replay: Replay[Tensor]) -> float:
        """Of a round for nobody; the best of a few."""
        took = []
        for _ in range(4):
            began = time.perf_counter()
            replay().tolist()
            took.append(time.perf_counter() - began)
        return min(took)

    def takes(self, turns: list[Turn], widest: int) -> bool:
        """Can all of these run on the device, in a pass of so many rows, no sequence having more than `widest`?"""
        if self._aside or len(turns) > LANES[-1]:
            return False
        if not all(runs_on_device(turn.sequence.request) for turn in turns):
            return False
        width = width_of(turns, [turn.decision.depth for turn in turns])
        return width <= widest and self.counts.keep_bits(lanes_for(len(turns)) * width)

    def launch(self, turns: list[Turn], began: float, drafting: float) -> None:
        """Start a round of these turns. `began`: when deciding on it did; `drafting`: seconds that the host drafted."""
        assert self.flight is None
        width = width_of(turns, [len(turn.draft.tokens) if uploads(turn) else turn.decision.depth for turn in turns])
        if not self.counts.keep_bits(lanes_for(len(turns)) * width):
            width = width_of(turns, [turn.decision.depth for turn in turns])
        sequences = [turn.sequence for turn in turns]
        same = sequences == [seat.sequence for seat in self._seats] and not self._stale
        if not same or not self._find_pages():
            self.leave()
            self._stale = True  # until they sit: somebody may interrupt
            self._seats = [self._join(sequence) for sequence in sequences]
            self._sit_down()
            self._start(turns, width, began, drafting, drafting)  # any round would have waited for this
        else:
            began -= self._unhidden
            self._start(turns, width, began, drafting, time.perf_counter() - began)

    def _find_pages(self) -> bool:
        """Tell the lanes of pages that their sequences got. False when more has changed, or the head has no room."""
        grown = False
        for seat in self._seats:
            cache = seat.sequence.cache
            if cache.slot != seat.slot or not cache.still_holds(seat.pages):
                return False  # it was parked and came back elsewhere
            if len(cache.pages) > len(seat.pages):
                grown = True
                if seat.head_pages is not None:
                    assert self.drafter is not None
                    pages = self.drafter.grow(seat.sequence.id, len(cache.pages) * self.pool.page)
                    if pages is None:
                        return False
                    seat.head_pages = pages
                seat.pages = list(cache.pages)
        if grown:
            self.lanes.turn_pages(self._seats)
        return True

    def _sit_down(self) -> None:
        self.lanes.seat(self._seats)
        if self.unread is not None:
            self.unread.clear()
            for lane, seat in enumerate(self._seats):
                if seat.waiting is not None:
                    self.unread.put(lane, seat.waiting)
                    seat.waiting = None
        self._depth = 0
        self._stale = False

    def _join(self, sequence: Sequence) -> Seat:
        """A seat; where the head may follow, it holds as many slots as the target holds tokens."""
        seat = Seat(sequence, list(sequence.cache.pages), sequence.cache.slot, None)
        if self.drafter is not None and "mtp" in sequence.arms:
            try:
                tell(sequence, self.drafter)
                joined = self.drafter.join(sequence.id, len(seat.pages) * self.pool.page)
            except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
                switch_off(sequence, self.drafter, error)
                joined = None
            if joined is not None:
                seat.head_pages, seat.waiting = joined
        return seat

    def leave(self) -> None:
        """The general way goes on from here: hand the head's caches back."""
        assert self.flight is None
        self._unhidden = 0.0
        self._aside = max(0, self._aside - 1)
        self._catch_up()
        for seat in self._seats:
            sequence = seat.sequence
            if seat.head_pages is not None and self.drafter is not None and "mtp" in sequence.told:
                tell(sequence, self.drafter)
                self.drafter.leave(sequence.id, sequence.cache.length)
        self._seats = []

    def _catch_up(self) -> None:
        """Let the head read what was put by."""
        if self.unread is None or not self.unread.rounds:
            return
        for lane, seat in enumerate(self._seats):
            if "mtp" not in seat.sequence.told:  # it was closed: its pages may be another's
                assert self.drafter is not None
                self.lanes.head_table[lane].fill_(self.drafter.pool.spare_page)
        self.unread.read(lanes_for(len(self._seats)))

    def _start(
        self, turns: list[Turn], width: int, began: float, drafting: float, waiting: float, repeats: int = 0
    ) -> None:
        headed = any(seat.head_pages is not None for seat in self._seats)
        filtered = any(seat.sequence.request.sampling.filtered for seat in self._seats)
        shape = Shape(lanes_for(len(turns)), width, headed, filtered, drafts=0)
        if headed:
            shape = shape._replace(drafts=self._wanted(turns, shape))
        typical = shape in self.rounds
        if self.unread is not None and (not shape.postpones or self.unread.rounds == RING or not typical):
            self._catch_up()
        if not typical:
            self._capture(shape)
        if self._depth > width - 1:
            self.lanes.drafted.clamp_(max=width - 1)
        drafts = self._hand_out_drafts(turns, shape)
        launched, events = time.perf_counter(), self._events()
        if events:
            events[0].record()
        device_result = self.rounds[shape]()
        self._results.reverse()
        host = self._results[0][: shape.lanes * (width + 2)].view(shape.lanes, width + 2)
        host.copy_(device_result, non_blocking=True)
        if events:
            events[1].record()
        self._depth = shape.drafts
        if self.unread is not None and shape.postpones:
            self.unread.rounds += 1
        self.flight = Flight(turns, shape, drafts, began, launched, waiting, drafting, host, events, repeats, typical)

    def _events(self) -> list[torch.cuda.Event]:
        """For the beginning and the end of a round."""
        cuda = self.pool.device.type == "cuda"
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []

    def _hand_out_drafts(self, turns: list[Turn], shape: Shape) -> list[int]:
        """Those of the host, and none where the head's would not find room. Returns how many each lane has."""
        drafts: list[int] = []
        given: list[list[int] | None] = []  # None: what the lane holds
        for turn, seat in zip(turns, self._seats, strict=True):
            held = min(shape.width - 1, self._depth) if seat.head_pages is not None else 0
            if uploads(turn):
                given.append(turn.draft.tokens)
            elif seat.sequence.cache.length + 1 + held > len(seat.pages) * self.pool.page:
                given.append([])
            else:
                given.append(None if shape.headed or shape.width == 1 else [])
            mine = given[-1]
            drafts.append(held if mine is None else len(mine))
        if any(mine is not None for mine in given):
            self.lanes.give(given)
        return drafts

    def _wanted(self, turns: list[Turn], shape: Shape) -> int:
        """Drafts for the next round: for a turn of the head, or for a sequence that only tries another arm."""
        if any(turn.decision.drafter == "mtp" for turn in turns):
            return RETURN if any(map(uploads, turns)) else shape.width - 1
        policies = [turn.sequence.policy for turn in turns]
        returns = any(isinstance(policy, Controller) and policy.current.arm == "mtp" for policy in policies)
        return RETURN if returns and shape._replace(drafts=RETURN) in self.rounds else 0

    def _capture(self, shape: Shape) -> None:
        """A capture runs once for nobody: the lanes are cleared for it and seated again."""
        self._stale = True
        if self.graphs.real:
            torch.cuda.synchronize(self.pool.device)  # the lanes are written anew while copies may be under way
        self.lanes.clear()
        self.rounds[shape] = self.graphs.capture(lambda: self._round(shape))
        self._sit_down()

    def _round(self, shape: Shape) -> Tensor:
        """What a graph holds. Returns [lanes, width + 2]."""
        from forerun.kernels.gpu.committing import accept

        count, width = shape.lanes, shape.width
        lanes, device = self.lanes, self.pool.device
        pending, position = lanes.pending[:count], lanes.position[:count]
        tokens = torch.cat([pending[None], lanes.drafts[: width - 1, :count]]).T.contiguous()  # [lanes, width]
        before = position.clone()
        states = self.pool.states
        recurrent = () if states is None else states.layers
        rows = PassRows.uniform(width, before, [table[:count] for table in lanes.tables], lanes.slot[:count], recurrent)
        output = self.decoder.forward(Pass(tokens.flatten(), rows, self.pool.layers, None, False, shape.headed))
        chosen, bad = self._choose(output.logits, shape, before)
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        result = torch.empty(count, width + 2, dtype=torch.int64, device=device)
        state = (None, None, None) if states is None else (lanes.slot[:count], states.kept, states.parity)  # type: ignore[union-attr]
        live, drafted = lanes.live[:count], lanes.drafted[:count]
        accept(tokens, chosen, bad, drafted, live, position, accepted, pending, result, *state)
        if shape.headed:
            assert output.features is not None and self.unread is not None
            if shape.postpones:
                self.unread.keep(output.features, chosen, before, accepted)
            else:
                self._draft(output.features, shape, chosen, before, accepted)
        return result

    def _choose(self, logits: Tensor, shape: Shape, before: Tensor) -> tuple[Tensor, Tensor]:
        """What plain decoding would emit after each row, and rows that have nothing; both [lanes, width]."""
        from forerun.kernels.gpu.choosing import choose_tokens
        from forerun.kernels.gpu.filtering import find_limits

        lanes, device, count, width = self.lanes, self.pool.device, shape.lanes, shape.width

        def of_rows(values: Tensor) -> Tensor:
            return values[:count].repeat_interleave(width, dim=0)

        chosen = torch.empty(count, width, dtype=torch.int64, device=device)
        bad = torch.empty(count, width, dtype=torch.int32, device=device)
        temperature, limits = of_rows(lanes.temperature), None
        if shape.filtered:
            rest = of_rows(lanes.top_k), of_rows(lanes.top_p), of_rows(lanes.min_p_offset)
            limits = find_limits(logits, self.vocab, temperature, *rest)
        places = (before[:, None] + torch.arange(1, width + 1, device=device)).flatten()
        seed = of_rows(lanes.seed)
        choose_tokens(logits, self.vocab, temperature, seed, places, chosen.view(-1), bad.view(-1), limits=limits)
        return chosen, bad

    def _draft(self, features: Tensor, shape: Shape, chosen: Tensor, before: Tensor, accepted: Tensor) -> None:
        """The head reads all rows of the round (rejected ones are overwritten later) and may draft for the next one."""
        from forerun.kernels.gpu.choosing import choose_tokens

        count, width = shape.lanes, shape.width
        head, lanes, drafter = self.head, self.lanes, self.drafter
        assert head is not None and drafter is not None
        pages, tables, slot = drafter.pool.layers, [lanes.head_table[:count]], lanes.slot[:count]
        tokens, rows = chosen.flatten(), PassRows.uniform(width, before, tables, slot)
        fused, batch = head.fuse(features, False), Pass(tokens, rows, pages, None, False)
        if not shape.drafts:
            head.fill(fused, batch)
            lanes.drafted[:count].zero_()
            return
        outputs = head.forward(fused, batch)
        every = torch.arange(count, device=tokens.device)
        last = outputs.view(count, width, -1)[every, accepted.long()]  # [lanes, hidden]
        position, bad = lanes.position[:count], torch.empty(count, dtype=torch.int32, device=tokens.device)
        places = lanes.position[:count].long()
        vocab = min(self.vocab, head.output.shape[0])
        for step in range(shape.drafts):
            if step:
                token = lanes.drafts[step - 1, :count]
                rows = PassRows.uniform(1, position + (step - 1), tables, slot)
                last = head.forward(last, Pass(token, rows, pages, None, False))
            out = lanes.drafts[step, :count]
            choose_tokens(
                head.logits(last),
                vocab,
                lanes.temperature[:count],
                lanes.seed[:count],
                places + (1 + step),
                out,
                bad,
                ids=head.vocabulary,
            )
        torch.mul(lanes.headed[:count], shape.drafts, out=lanes.drafted[:count])

    def land(self, costs: CostTable, again: list[Sequence] | None) -> None:
        """Take in the round under way. `again`: who runs next; when that is the same, the next round starts first."""
        flight = self.flight
        assert flight is not None
        if flight.events:
            flight.events[1].synchronize()
        now = time.perf_counter()
        results = flight.result.tolist()
        self.flight = None
        try:
            if again is not None and self._goes_on(flight, results, again):
                self._start(flight.turns, flight.shape.width, now, 0.0, 0.0, flight.repeats + 1)
        except BaseException:
            self._stale = True  # who knows how far the lanes have come
            raise
        finally:
            self._take_in(flight, results, costs, now)

    def _take_in(self, flight: Flight, results: list[list[int]], costs: CostTable, now: float) -> None:
        """Whatever becomes of the next round, this one has happened."""
        took, width, alone = now - flight.began, flight.shape.width, flight.seconds(now)
        if flight.typical:
            learn_costs(costs, flight, alone)
        for turn, drafted, line in zip(flight.turns, flight.drafts, results, strict=False):
            if turn.sequence.status is Status.RUNNING:
                accepted = self._take(turn, drafted, line[:width], line[width], bool(line[-1]))
                turn.sequence.counters.spend(took, flight.drafting)
                self._aside = ASIDE if accepted < 0 else self._aside
                if flight.typical and accepted >= 0:
                    waiting = flight.waiting if uploads(turn) else 0.0
                    turn.sequence.policy.learn(turn.decision, drafted, accepted, alone + waiting)
        self._unhidden = time.perf_counter() - now if self.flight is None else 0.0

    def _goes_on(self, flight: Flight, results: list[list[int]], running: list[Sequence]) -> bool:
        """Same sequences, none at its end or to be run otherwise, and pages for another round."""
        if [turn.sequence for turn in flight.turns] != running or any(map(uploads, flight.turns)):
            return False
        width = flight.shape.width
        if flight.shape.postpones and self.unread is not None and not self.unread.may_go_on(flight.shape.lanes):
            return False
        for index, (turn, line) in enumerate(zip(flight.turns, results, strict=False)):
            if line[width] < 0:
                return False
            sequence, tokens = turn.sequence, line[: line[width] + 1]
            if tries(turn) and (flight.drafts[index] or flight.repeats):
                return False  # the head's trial begins with a round that has no drafts yet
            if flight.wishes is not None:
                wish = flight.wishes[index]
                if wish.decision != turn.decision and wish.holds(tokens):
                    return False
            room = len(sequence.cache.pages) * self.pool.page
            full = sequence.cache.length + len(tokens) + width > room
            ends = line[-1] or len(tokens) >= sequence.remaining or not sequence.request.stop_ids.isdisjoint(tokens)
            if full or ends:
                return False
        return True

    def _take(self, turn: Turn, drafted: int, chosen: list[int], accepted: int, bad: bool) -> int:
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
        self._stale |= emitted != accepted + 1
        if accepted < 0:
            return accepted
        accepted = min(accepted, emitted)
        sequence.counters.count(turn.decision.arm, drafted, accepted)
        return accepted
