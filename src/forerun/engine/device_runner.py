"""Rounds on a GPU: captured as graphs, and run while the host delivers the one before and plans the one after.

The host reads one small tensor per round. What a device cannot decide (rejection sampling, log probabilities, a very
wide nucleus) the host decides from the logits of the same pass; such a round ends before the next one is planned.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.pages import PagePool
from forerun.draft.arms import ARMS, MAX_DEPTH
from forerun.draft.protocol import Draft, RowDrafter
from forerun.engine.captures import (
    CHUNKS,
    FEW,
    FEW_CHUNKS,
    LINES,
    PROMPT_LINES,
    PROMPT_ROWS,
    SMALL,
    WIDTHS,
    DraftShape,
    Graphs,
    PassShape,
    Upload,
    bucket,
    bucketed,
)
from forerun.engine.constrained import constrain
from forerun.engine.drafters import Drafters
from forerun.engine.plan import Outcome, Plan, Ticket, Turn
from forerun.engine.request import Request
from forerun.engine.runner import Runner, failed
from forerun.engine.sequence import Sequence
from forerun.engine.slots import SLOTS, BatchSlots
from forerun.errors import ForerunError
from forerun.kernels.interface import CHUNK_ROWS, LARGEST_TOP_K, WIDEST, PassRows, RowTables
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import media_of_pass
from forerun.models.layers.rows import Output, Pass, pictures_of
from forerun.progress import Progress

SPARE = 2.0  # times as many rows as a round needs: a graph that is there is used before another one is captured
NO_STARTS = torch.zeros(1, dtype=torch.int32)  # what a GPU does not read of a pass
NONE: frozenset[str] = frozenset()
MOST = 400  # rounds that stay captured; each holds memory of its own for its launches
ASIDE = 4  # rounds that the host decides for a sequence after one the device could not: such text comes in stretches


@dataclass(slots=True)
class Launched:
    """What the device's runner keeps of a round."""

    slots: list[int]  # of each turn
    starts: list[int]  # the first row of each
    widths: list[int]  # rows of each whose logits are there
    width: int  # of a line
    output: Output
    result: Tensor  # [lines, width + 2] in host memory: chosen tokens, accepted drafts, whether the first row was bad
    host: set[int] = field(default_factory=set)  # turns, by number, that the host decides
    first_logits: dict[int, Tensor] = field(default_factory=dict)  # [1, V] by turn, where a device may find no token
    events: list[torch.cuda.Event] = field(default_factory=list)  # its beginning and its end, on a GPU
    before: torch.cuda.Event | None = None  # the end of the round that was under way when it was launched


class DeviceRunner(Runner):
    """Whole rounds as graphs. Where there are none (the interpreter), the same work is launched each time."""

    overlaps = True

    def __init__(self, decoder: Decoder, pool: PagePool, drafters: Drafters, context: int) -> None:
        super().__init__(decoder, drafters, restartable=False)
        self.followers = frozenset(name for name, one in drafters.rows.items() if one.specs)
        self.decoder, self.pool, self.graphs = decoder, pool, Graphs(pool.device)
        columns = max((one.features for one in drafters.rows.values()), default=0)
        pages = pool.pages_for(context + 2 * (MAX_DEPTH + 1))
        self.slots = BatchSlots(pages, pool, drafters.vocab, columns, decoder.dtype)
        self._columns = columns
        self._uploads = [Upload(SMALL, FEW_CHUNKS, pool.device), Upload(PROMPT_ROWS[-1], CHUNKS[-1], pool.device)]
        self._rounds: OrderedDict[PassShape, Callable[[], tuple[Output, Tensor]]] = OrderedDict()
        self._drafts: OrderedDict[DraftShape, Callable[[], Tensor]] = OrderedDict()
        self._aside: dict[int, int] = {}  # sequence → rounds that the host decides for it
        self._void: set[int] = set()  # sequences whose round under way started from a token that was none
        self._awaited: set[int] = set()  # sequences that the host has work for before their next round
        cuda = pool.device.type == "cuda"
        self._ended: torch.cuda.Event | None = None  # of the last round that was launched
        self._results = [torch.zeros(SLOTS * (WIDEST + 2), dtype=torch.int64, pin_memory=cuda) for _ in range(3)]
        self._events = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] if cuda else [] for _ in range(3)]

    # ---- a round

    def waits_for(self, sequence: Sequence) -> bool:
        """Must the host know its text to say what may follow, or choose for it, or do something between its rounds?"""
        return sequence.constraint is not None or sequence.id in self._aside or sequence.id in self._awaited

    def start(self, plan: Plan) -> Ticket:
        """Queue a round behind the one under way."""
        typical = self._launch_drafts(plan, self.drafters.propose(plan.turns))
        ticket = Ticket(plan, typical=typical)
        for turn in plan.turns:
            if turn.sequence.constraint is not None and turn.width:
                constrain(turn)
        sound = [turn for turn in plan.turns if turn.error is None]
        ticket.outcomes = [failed(turn, turn.error) for turn in plan.turns if turn.error is not None]
        if sound:
            self._launch(ticket, sound)
        return ticket

    def _launch_drafts(self, plan: Plan, drafted: list[Turn]) -> bool:
        """Row drafters draft for the turns `drafted`. Returns whether everything was captured before."""
        every, typical = [turn.sequence for turn in plan.turns], True
        self._events.append(self._events.pop(0))
        if self._events[-1]:
            self._events[-1][0].record()
        slots = self.slots.assign(every)
        lines = bucket(LINES, 1 + max(self.slots.occupants))
        self._awaited = set()
        if lines > bucket(LINES, len(every)):  # those in higher slots than they must will move
            self._awaited = {one.sequence.id for slot, one in self.slots.occupants.items() if slot >= len(every)}
        for name, drafter in self.drafters.rows.items():
            where = {id(turn): slot for turn, slot in zip(plan.turns, slots, strict=True)}
            mine = [(turn, where[id(turn)]) for turn in drafted if turn.decision.drafter == name]
            mine = [(turn, slot) for turn, slot in mine if self._has_entries(drafter, turn)]
            if not mine:
                continue
            depth = max(turn.decision.depth for turn, _ in mine)
            shape = DraftShape(name, depth, lines, any(t.sequence.request.sampling.needs_edits for t, _ in mine))
            upload = self._uploads[0]
            upload.here["drafting"].fill(SLOTS)
            for turn, slot in mine:
                upload.here["drafting"][slot] = slot
                entries = turn.sequence.followed.get(name)
                upload.here["first"][slot] = 0 if entries is None else entries.start
            upload.send()
            try:
                if shape not in self._drafts:
                    typical = False
                    self._capture_drafts(shape)
                self._drafts.move_to_end(shape)
                self._drafts[shape]()
            except Exception as error:  # noqa: BLE001 - a drafter is allowed to fail; it is reported and left out
                for turn, _ in mine:
                    self.drafters.switch_off(turn.sequence, name, error)
                continue
            for turn, _ in mine:
                turn.drafts_on_device = turn.decision.depth
            if any(turn.sequence.constraint is not None for turn, _ in mine):
                self._bring_drafts(mine)
        return typical

    def _has_entries(self, drafter: RowDrafter, turn: Turn) -> bool:
        """Are the entries of a drafter there that must have all of them? Else it catches up, unless a round is under
        way: then its turn has no drafts.
        """
        sequence = turn.sequence
        if drafter.warm is not None:
            return True
        entries = sequence.followed.get(drafter.name)
        if entries is not None and entries.start == drafter.first and entries.stop in (None, sequence.reach):
            return True
        if sequence.is_under_way:
            self._awaited.add(sequence.id)
            return False
        self._catch_up(drafter, sequence)
        return True

    def _capture_drafts(self, shape: DraftShape) -> None:
        self._drafts[shape] = self.graphs.capture(lambda: self._draft_body(shape))
        self._forget_oldest(self._drafts)

    def _bring_drafts(self, mine: list[tuple[Turn, int]]) -> None:
        """Drafts of sequences whose text is constrained are cut by the host: it waits for them."""
        tokens = self.slots.drafts.cpu()
        for turn, slot in mine:
            if turn.sequence.constraint is not None:
                turn.draft = Draft(tokens[: turn.decision.depth, slot].tolist())
                turn.drafts_on_device = 0

    def _launch(self, ticket: Ticket, turns: list[Turn]) -> None:
        """The pass over all rows and what follows from it."""
        slots = [slot for turn in turns if (slot := self.slots.slot_of(turn.sequence)) is not None]
        host = {n for n, turn in enumerate(turns) if self._host_decides(turn.sequence) and turn.width}
        for turn, slot in zip(turns, slots, strict=True):
            if turn.sequence.constraint is not None:
                self.slots.mask(slot, turn.masks)
        launched, shape, upload = self._lay_out(turns, slots, host)
        upload.send()
        try:
            output, result = self._run(shape, upload, turns, ticket)
        except Exception as error:
            if not shape.follows or not self._has_not_run(shape, turns):
                raise
            for turn in turns:  # it may have been a drafter: without drafters the target's own fault comes again
                for name in turn.written_by:
                    self.drafters.switch_off(turn.sequence, name, error)
            output, result = self._run(shape._replace(follows=NONE), upload, turns, ticket)
        self._results.append(self._results.pop(0))
        launched.output = output
        for n, turn in enumerate(turns):
            if turn.is_prompt and turn.width and n not in host and turn.sequence.request.sampling.filtered:
                line = slots[n] * shape.width
                launched.first_logits[n] = output.logits[line : line + 1].clone()
        launched.result = self._results[-1][: result.numel()].view(result.shape).copy_(result, non_blocking=True)
        launched.events = self._events[-1]
        if launched.events:
            # Where the host has waited for tokens, what the device waited for it is a part of what that costs.
            waited = ticket.plan.waited and ticket.plan.behind
            if waited or any(turn.sequence.is_under_way for turn in turns):
                launched.before = self._ended
            self._ended = launched.events[1]
            self._ended.record()
        for turn, slot in zip(turns, slots, strict=True):
            if self.followers:
                # Of a generated row the device alone knows the place: entries count from where it may be at most.
                begin = turn.begin if turn.is_prompt else turn.sequence.reach
                self.drafters.follow(turn.sequence, turn.written_by, begin)
            if self._columns:
                turn.sequence.cache.edge = self.slots.edges[slot]
            if turn.is_prompt and turn.sequence.cache.keeps_state(turn.stop):  # the next round moves it on
                states, mine = self.pool.states, turn.sequence.cache.slot
                assert states is not None and mine is not None
                turn.state = states.copy(mine, self.pool.device)
        ticket.launched = (turns, launched)
        asked = (turn.is_prompt and turn.sequence.request.prompt_logprobs for turn in turns)
        ticket.reads_back = bool(host) or any(asked)

    def _run(self, shape: PassShape, upload: Upload, turns: list[Turn], ticket: Ticket) -> tuple[Output, Tensor]:
        """Launch the pass and the choice; capture them first where they are not."""
        if any(turn.is_prompt and turn.sequence.request.media is not None for turn in turns):
            return self._body(shape, upload, turns)
        if shape not in self._rounds:
            ticket.typical = False
            self._rounds[shape] = self._capture(shape, upload)
            self._forget_oldest(self._rounds)
        self._rounds.move_to_end(shape)
        return self._rounds[shape]()

    def _has_not_run(self, shape: PassShape, turns: list[Turn]) -> bool:
        """Did nothing of a round that failed change a sequence? Captures run for none; recurrent state moves on."""
        media = any(turn.is_prompt and turn.sequence.request.media is not None for turn in turns)
        return self.pool.states is None or (shape not in self._rounds and not media)

    def _lay_out(self, turns: list[Turn], slots: list[int], host: set[int]) -> tuple[Launched, PassShape, Upload]:
        """Write down the rows: first those that are generated, then those of prompts."""
        written = [n for n, turn in enumerate(turns) if not turn.is_prompt]
        read = [n for n, turn in enumerate(turns) if turn.is_prompt]
        counts = np.array([1 + turns[n].drafts for n in written], dtype=np.int32)
        lengths = [turns[n].stop - turns[n].begin for n in read]
        pieces = sum(-(-length // CHUNK_ROWS) for length in lengths)
        generated = int(counts.sum())
        rows = generated + sum(lengths)
        starts, widths = np.zeros(len(turns), np.int32), np.zeros(len(turns), np.int32)
        widths[written] = counts
        widths[read] = [turns[n].ends_prompt for n in read]
        shape = self._shape(turns, rows, pieces, int(widths.max()))
        upload = self._upload_for(shape)
        here = upload.here
        for name, idle in (("live", 0), ("drafted", 0), ("recurrent", self.pool.spare_slot), ("tail", -1)):
            here[name].fill(idle)
        for name in ("turns", "chunks", "stretches"):
            here[name].fill(0)
        if written:
            mine, first = np.array(slots, np.int32)[written], np.cumsum(counts) - counts
            behind = np.arange(generated, dtype=np.int32) - np.repeat(first, counts)  # the pending token
            here["token"][:generated] = here["place"][:generated] = -1 - behind
            here["owner"][:generated] = np.repeat(mine, counts)
            here["turns"][: len(written)] = np.stack([first, counts, mine], axis=1)
            here["drafted"][mine] = counts - 1
            here["live"][mine] = [n not in host for n in written] if host else 1
            starts[written] = first
            for n in written:
                turn, cache = turns[n], turns[n].sequence.cache
                if turn.draft.tokens:
                    here["token"][starts[n] + 1 : starts[n] + 1 + turn.drafts] = turn.draft.tokens
                if cache.slot is not None:
                    here["recurrent"][slots[n]] = cache.slot
        here["source"][:rows] = np.arange(-1, rows - 1)
        row, piece = generated, 0
        for stretch, (n, length) in enumerate(zip(read, lengths, strict=True)):
            turn, slot = turns[n], slots[n]
            here["token"][row : row + length] = turn.sequence.request.prompt[turn.begin : turn.stop]
            here["place"][row : row + length] = np.arange(turn.begin, turn.stop)
            here["owner"][row : row + length] = slot
            borders = range(0, length, CHUNK_ROWS)
            here["stretches"][stretch] = piece, len(borders), slot
            for start in borders:
                here["chunks"][piece] = row + start, min(CHUNK_ROWS, length - start), slot
                piece += 1
            starts[n] = row
            here["live"][slot] = turn.ends_prompt and n not in host
            here["tail"][slot] = row + length - 1
            row += length
        here["source"][starts] = -1
        for name, idle in (("token", 0), ("place", 0), ("owner", SLOTS), ("source", -1)):
            here[name][rows : shape.rows] = idle
        wanted = here["wanted"][: shape.lines * shape.width].reshape(shape.lines, shape.width)
        wanted[:] = 0
        chosen = [n for n, turn in enumerate(turns) if widths[n]]
        if chosen:
            lines, last = np.array(slots)[chosen], widths[chosen] - 1
            first = np.where([turns[n].is_prompt for n in chosen], here["tail"][lines], starts[chosen])
            wanted[lines] = first[:, None] + np.minimum(np.arange(shape.width), last[:, None])
        nothing: Any = None
        launched = Launched(slots, starts.tolist(), widths.tolist(), shape.width, nothing, nothing, host)
        return launched, shape, upload

    def _shape(self, turns: list[Turn], rows: int, chunks: int, width: int) -> PassShape:
        """What the round is captured for."""
        requests = [turn.sequence.request for turn in turns]
        features = bool(self._columns) or any(request.prompt_logprobs for request in requests)
        follows = NONE.union(*(turn.written_by for turn in turns)) & self.followers if self.followers else NONE
        edited = any(request.sampling.needs_edits for request in requests)
        edited = edited or any(turn.masks is not None for turn in turns)
        filtered = any(request.sampling.filtered for request in requests)
        lines = 1 + max(self.slots.occupants)
        shape = bucketed(PassShape(rows, lines, max(1, width), chunks, features, follows, filtered, edited))
        if shape in self._rounds or not self.graphs.real:
            return shape
        enough = [other for other in self._rounds if other.holds(shape) and other.rows <= SPARE * shape.rows]
        return min(enough, key=lambda other: (other.rows, other.lines * other.width), default=shape)

    def _upload_for(self, shape: PassShape) -> Upload:
        return self._uploads[shape.rows > SMALL or shape.chunks > FEW_CHUNKS]

    def _host_decides(self, sequence: Sequence) -> bool:
        if self._aside and sequence.id in self._aside:
            self._aside[sequence.id] -= 1
            if not self._aside[sequence.id]:
                del self._aside[sequence.id]
            return True
        return not decides_for(sequence.request)

    # ---- what is captured

    def _capture(self, shape: PassShape, upload: Upload) -> Callable[[], tuple[Output, Tensor]]:
        """A capture runs once before: for no sequence, so that nothing of it stays."""
        if not self.graphs.real:
            return lambda: self._body(shape, upload)
        here = {
            name: upload.here[name].copy()
            for name in ("owner", "turns", "chunks", "stretches", "live", "tail", "place", "token")
        }
        upload.here["owner"].fill(SLOTS)
        upload.here["token"].fill(0)
        upload.here["place"].fill(0)
        upload.here["tail"].fill(-1)
        for name in ("turns", "chunks", "stretches", "live"):
            upload.here[name].fill(0)
        upload.send()
        try:
            return self.graphs.capture(lambda: self._body(shape, upload))
        finally:
            for name, before in here.items():
                upload.here[name][:] = before
            upload.send()

    def _body(self, shape: PassShape, upload: Upload, turns: list[Turn] | None = None) -> tuple[Output, Tensor]:
        """The pass, entries of drafters, the choice. `turns`: where they have media, which are not captured."""
        from forerun.kernels.gpu.rows import expand, features_before

        slots, there, pool = self.slots, upload.there, self.pool
        owner = there["owner"][: shape.rows]
        tokens, at = expand(
            there["token"][: shape.rows],
            there["place"][: shape.rows],
            owner,
            slots.pending,
            slots.position,
            slots.drafts,
        )
        turns_of, pieces, stretches = (there[name] for name in ("turns", "chunks", "stretches"))
        tables = RowTables(owner, at, turns_of[: shape.lines], pieces[: shape.chunks], stretches[: shape.chunks])
        tables.generated = min(shape.rows, shape.lines * shape.width)
        states = () if pool.states is None else pool.states.layers
        rows = PassRows(NO_STARTS, 0, at, slots.tables, slots.recurrent, states, tables=tables)
        wanted = there["wanted"][: shape.lines * shape.width]
        batch = Pass(tokens, rows, pool.layers, wanted, shape.features)
        if turns is not None:
            self._add_media(batch, turns, shape.rows)
        output = self.decoder.forward(batch)
        for name in sorted(shape.follows):
            drafter, found = self.drafters.rows[name], None
            if drafter.features:
                assert output.features is not None
                source = there["source"][: shape.rows]
                seen = output.features[:, -self._columns :]
                found = features_before(seen, slots.last, source, owner)[:, -drafter.features :]
            drafter.follow(batch, found)
        return output, self._choose_body(shape, upload, tokens, output)

    def _choose_body(self, shape: PassShape, upload: Upload, tokens: Tensor, output: Output) -> Tensor:
        """Choose what plain decoding would emit after each row, accept what agrees, move every slot on."""
        from forerun.kernels.gpu.choosing import choose_tokens
        from forerun.kernels.gpu.committing import accept
        from forerun.kernels.gpu.editing import edit_rows, remember
        from forerun.kernels.gpu.filtering import find_limits
        from forerun.kernels.gpu.rows import keep_last

        slots, there, device, count, width = self.slots, upload.there, self.pool.device, shape.lines, shape.width
        wanted, logits, vocab = there["wanted"][: count * width].view(count, width), output.logits, slots.vocab
        fed, before, live = tokens[wanted], slots.position[:count].clone(), there["live"][:count]

        def of_rows(values: Tensor) -> Tensor:
            return values[:count].repeat_interleave(width, dim=0)

        edits = slots.edits if shape.edited else None
        assert edits is not None or not shape.edited, "captured now, a round would never be edited"
        if edits is not None:
            edited = torch.empty(len(logits), vocab, dtype=torch.float32, device=device)
            edit_rows(logits, vocab, fed, edits, edited)
            logits = edited
        chosen = torch.empty(count, width, dtype=torch.int64, device=device)
        bad = torch.empty(count, width, dtype=torch.int32, device=device)
        temperature, limits = of_rows(slots.temperature), None
        if shape.filtered:
            rest = of_rows(slots.top_k), of_rows(slots.top_p), of_rows(slots.min_p_offset)
            limits = find_limits(logits, vocab, temperature, *rest)
        places = (before[:, None] + torch.arange(1, width + 1, device=device)).flatten()
        into = chosen.view(-1), bad.view(-1)
        choose_tokens(logits, vocab, temperature, of_rows(slots.seed), places, *into, limits=limits)
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        result = torch.empty(count, width + 2, dtype=torch.int64, device=device)
        states = self.pool.states
        state = (None, None, None)
        if isinstance(states, DeviceStates):
            state = (there["recurrent"][:count], states.kept, states.parity)  # type: ignore[assignment]
        moved = slots.position[:count], accepted, slots.pending[:count], result, slots.limit[:count]
        accept(fed, chosen, bad, there["drafted"][:count], live, *moved, *state)
        if edits is not None:
            remember(chosen, accepted, live, edits)
        if output.features is not None and self._columns:
            seen = output.features[:, -self._columns :]
            keep_last(seen, slots.last, wanted, there["tail"][:count], live, accepted)
        return result

    def _draft_body(self, shape: DraftShape) -> Tensor:
        """Drafts of every slot that a drafter drafts for; the others draft where nothing is kept."""
        drafter, slots, there, count = (
            self.drafters.rows[shape.drafter],
            self.slots,
            self._uploads[0].there,
            shape.lines,
        )
        owner = there["drafting"][:count]
        idle = owner == SLOTS
        every = torch.arange(count, device=owner.device, dtype=torch.int32)
        turns = torch.stack([every, torch.ones_like(every), owner], dim=1)
        none = turns[:0]
        hidden = drafter.begin(slots.last[:count, -drafter.features :] if drafter.features else None)
        tokens = slots.pending[:count]
        for step in range(shape.depth):
            at = torch.where(idle, 0, (slots.position[:count] + drafter.place(step)).clamp(min=0))
            rows = PassRows(NO_STARTS, 1, at, slots.tables, slots.recurrent, first=there["first"])
            rows.tables = RowTables(owner, at, turns, none, none, generated=count)
            hidden, logits = drafter.step(step, hidden, Pass(tokens, rows, self.pool.layers, None))
            self._draw(drafter, shape, step, logits)
            tokens = slots.drafts[step, :count]
        return slots.drafts

    def _draw(self, drafter: RowDrafter, shape: DraftShape, step: int, logits: Tensor) -> None:
        """Draft number `step` of every slot: what the target would choose if these were its logits."""
        from forerun.kernels.gpu.choosing import choose_tokens
        from forerun.kernels.gpu.editing import edit_drafts

        slots, count, ids = self.slots, shape.lines, drafter.vocabulary
        vocab = min(drafter.vocab, logits.shape[1])
        edits = slots.edits if shape.edited else None
        if edits is not None:
            edited = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
            edit_drafts(logits, vocab, slots.drafts[:, :count].T, step, edits, ids, edited)
            logits = edited
        bad = torch.empty(count, dtype=torch.int32, device=logits.device)
        places = slots.position[:count].long() + (1 + step)
        choose_tokens(
            logits, vocab, slots.drafting[:count], slots.seed[:count], places, slots.drafts[step, :count], bad, ids=ids
        )

    def _add_media(self, batch: Pass, turns: list[Turn], rows: int) -> None:
        """What takes the place of placeholders; generated rows and padding have none."""
        ordered = sorted(turns, key=lambda turn: turn.is_prompt)
        parts = [
            (turn.sequence.request.media, turn.begin, turn.stop) if turn.is_prompt else (None, 0, 1 + turn.drafts)
            for turn in ordered
        ]
        parts.append((None, 0, rows - sum(stop - begin for _, begin, stop in parts)))
        seen = media_of_pass(parts, self.pool.device)
        assert seen is not None and batch.rows.tables is not None
        if seen.positions is not None:  # of generated rows the device alone knows them
            written = sum(1 + turn.drafts for turn in ordered if not turn.is_prompt)
            seen.positions[:, :written] = batch.rows.tables.at[:written]
        batch.media = seen
        if seen.together is not None:
            batch.rows.tables.pictures = pictures_of(seen.together, batch.rows.tables.at)

    def _forget_oldest(self, captured: OrderedDict[Any, Any]) -> None:
        while len(captured) > MOST:
            captured.popitem(last=False)

    # ---- what came of it

    def outcomes(self, ticket: Ticket) -> list[Outcome]:
        """Wait for the device and read the small tensor."""
        if ticket.launched is None:
            return ticket.outcomes
        turns, launched = ticket.launched
        ticket.launched = None
        if not launched.events:
            ticket.seconds = time.perf_counter() - ticket.plan.began
        else:
            launched.events[1].synchronize()
            # A round that was queued behind another one begins when that one ends, however early it was launched.
            begin = launched.events[0] if launched.before is None else launched.before
            ticket.seconds = begin.elapsed_time(launched.events[1]) / 1e3
        lines, width = launched.result.tolist(), launched.width
        found, mine = [], []
        for n, (turn, slot) in enumerate(zip(turns, launched.slots, strict=True)):
            outcome = Outcome(turn, [], drafted=turn.drafts + turn.cut)
            found.append(outcome)
            if turn.sequence.id in self._void:
                self._void.discard(turn.sequence.id)
                self.threw_away(turn.sequence)
                continue
            outcome.by_host = n in launched.host
            if n in launched.host or (turn.is_prompt and turn.sequence.request.prompt_logprobs):
                self._read(outcome, launched, n)
            if n in launched.host:
                logits = launched.output.logits[slot * width : slot * width + launched.widths[n]]
                mine.append((outcome, logits))
            elif turn.width and not self._decided(outcome, lines[slot], width) and turn.is_prompt:
                mine.append((outcome, self._decide_first(outcome, launched, n)))
        if mine:
            self._bring_host_drafts(mine)
            self._choose(mine)
        logits_of = {id(outcome): logits for outcome, logits in mine}
        for outcome in found:
            request = outcome.turn.sequence.request
            if request.logprobs is not None or request.prompt_logprobs:
                self._add_logprobs(outcome, logits_of.get(id(outcome), launched.output.logits[:0]))
        return [*found, *ticket.outcomes]

    def _decided(self, outcome: Outcome, line: list[int], width: int) -> bool:
        """What the device has chosen. False: it found that it cannot tell, and the host decides for a while."""
        turn, accepted = outcome.turn, line[width]
        if line[-1]:
            outcome.error = bad_row(turn.sequence.request.sampling.needs_edits or turn.masks is not None)
        elif accepted < 0:
            self._aside[turn.sequence.id] = ASIDE
            return False
        else:
            outcome.tokens, outcome.accepted = line[: accepted + 1], accepted
        return True

    def _decide_first(self, outcome: Outcome, launched: Launched, number: int) -> Tensor:
        """The first token of an answer, which the device could not decide on: the logits that the host chooses from.

        Rows of a prompt cannot be run again where a state has moved on; a row that was queued behind has fed the last
        token of the prompt once more, and counts for nothing.
        """
        outcome.by_host = True
        if outcome.turn.sequence.ahead:
            self._void.add(outcome.turn.sequence.id)
        return launched.first_logits[number]

    def _read(self, outcome: Outcome, launched: Launched, number: int) -> None:
        """The features of its rows: the memory they lie in is written again by the next round."""
        turn, start = outcome.turn, launched.starts[number]
        if launched.output.features is not None:
            count = turn.stop - turn.begin if turn.is_prompt else 1 + turn.drafts
            outcome.features = launched.output.features[start : start + count].clone()

    def _bring_host_drafts(self, mine: list[tuple[Outcome, Tensor]]) -> None:
        """Drafts that the device made and the host judges."""
        if any(outcome.turn.drafts_on_device for outcome, _ in mine):
            tokens = self.slots.drafts.cpu()
            for outcome, _ in mine:
                turn, slot = outcome.turn, self.slots.slot_of(outcome.turn.sequence)
                if turn.drafts_on_device and slot is not None:
                    turn.draft = Draft(tokens[: turn.drafts_on_device, slot].tolist())
                    turn.drafts_on_device = 0

    def keep(self, outcome: Outcome, count: int) -> None:
        """The device has kept the rows by itself, unless the host decided: then the slot is filled anew."""
        turn, sequence, cache = outcome.turn, outcome.turn.sequence, outcome.turn.sequence.cache
        entries = self.drafters.entries(sequence)
        if turn.is_prompt:
            cache.has_read(count, entries, turn.state)
        elif outcome.by_host:
            cache.begin(1 + turn.drafts, prompt=False)
            cache.commit(count, None, entries)
        else:
            cache.committed(count, entries)
        if outcome.by_host:
            seen = outcome.features
            cache.edge = None if seen is None or not count or not self._columns else seen[count - 1, -self._columns :]
            slot = self.slots.slot_of(sequence)
            if slot is not None:
                self.slots.occupants[slot].stale = True
        self._forget_rejected(sequence)

    def threw_away(self, sequence: Sequence) -> None:
        """The device has recorded rows that do not count."""
        states = self.pool.states
        if isinstance(states, DeviceStates) and sequence.cache.slot is not None:
            states.kept[sequence.cache.slot].zero_()

    def forget(self, sequence: Sequence) -> None:
        """Its slot is free."""
        self._aside.pop(sequence.id, None)
        self._void.discard(sequence.id)
        self.slots.leave([sequence])

    def prepare(self, widest: int, filtered: bool, progress: Progress, batch: int = 1) -> None:
        """Capture what one sequence may want and is not there, so that no answer waits. `batch`: what batches of up to
        so many want is captured too.
        """
        if not self.graphs.real:
            return
        most, wanted = bucket(LINES, batch), list[PassShape]()
        for lines in [lines for lines in LINES if lines <= most]:
            widths = WIDTHS if lines == 1 else range(1, 8) if lines <= FEW else (1, 2, 4, 8)
            wanted += [self._usual(lines * width, lines, width, 0, filtered) for width in widths if width <= widest]
            wanted += [wanted[-1]._replace(rows=lines, width=1, follows=NONE)]
        for lines in [lines for lines in PROMPT_LINES if lines <= bucket(PROMPT_LINES, batch)]:
            for rows in PROMPT_ROWS[: PROMPT_ROWS.index(2048) + 1]:
                for width in (1, 4, 8) if lines > 1 else (1,):
                    wanted += [self._usual(rows, lines, width, CHUNKS[0], filtered)] if rows < 2048 else []
                    wanted += [self._usual(rows, lines, width, CHUNKS[1], filtered)] if rows > 512 else []
        drafts = [
            DraftShape(name, depth, lines, False)
            for name in self.drafters.rows
            for lines in LINES
            for depth in range(1, min(ARMS[name].deepest, widest - 1) + 1)
            if lines <= most
        ]
        missing = [shape for shape in dict.fromkeys(wanted) if shape not in self._rounds]
        with progress.task("capturing rounds", len(missing) + len(drafts)) as task:
            for shape in missing:
                self._rounds[shape] = self._capture(shape, self._upload_for(shape))
                task.advance()
            for draft in drafts:
                if draft not in self._drafts:
                    self._capture_drafts(draft)
                task.advance()

    def _usual(self, rows: int, lines: int, width: int, chunks: int, filtered: bool) -> PassShape:
        """Of a round in which drafters follow, and nothing edits logits."""
        return PassShape(rows, lines, width, chunks, bool(self._columns), self.followers, filtered, False)


def decides_for(request: Request) -> bool:
    """The device compares, filters the best tokens only, and keeps logits to itself."""
    params = request.sampling
    plain = request.accept == "coupled" and request.logprobs is None
    return plain and (params.greedy or params.top_k <= LARGEST_TOP_K)


def bad_row(edited: bool) -> ForerunError:
    """What the host would have said; where logits were edited, the device does not know which of the two it was."""
    broken = "the model gave a logit that is infinite or not a number: try --dtype float32"
    if edited:
        broken = f"every token is ruled out (loosen suppress, logit_bias, lang_bias or the grammar), or {broken}"
    return ForerunError(broken)
