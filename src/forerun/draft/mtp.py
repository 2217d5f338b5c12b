"""The `mtp` drafter: a head of one block that sees the target's hidden states; its cache follows the target's.

Slots hold true entries, made from what the target computed at committed positions. While drafting, the head writes
entries from its own outputs after them; these are forgotten when the draft is done, and the accepted ones among them
come again as true entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.drawing import Drawing
from forerun.draft.mtp_device import MtpDeviceHalf
from forerun.draft.protocol import Capture, Draft, Drafter, SlotTensors, Want, draft_for_some
from forerun.kernels.matrix import Matrix
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import PromptMedia
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import make_pass

if TYPE_CHECKING:
    from forerun.models.recorded import RecordedHead

FEW = 16  # slots that are caught up in a pass together with other sequences
LATE = 32  # slots that a head which joins late has filled in before it drafts: with fewer it is seldom right
MOST_QUEUED = 32  # slots that may wait for the next draft; a prompt is worked off while it is read


@dataclass(slots=True)
class Waiting:
    """A few slots from `start` on that are not filled in yet."""

    start: int
    features: Tensor  # [slots, features]
    tokens: list[int]  # after each


@dataclass(slots=True, eq=False)
class State:
    """One sequence as the head sees it. The queue holds the features of the slots after those in the cache."""

    cache: SequenceCache
    tokens: list[int]  # committed by the target, the pending one included
    media: PromptMedia | None = None  # of its prompt, where its slots see them; until all of those are in the cache
    queue: list[Tensor] = field(default_factory=list)  # each [rows, features]
    fed: int = 0  # slots whose features have come
    last: Tensor | None = None  # [hidden], the head's output at the last slot of the cache
    least: int = 0  # slots whose features must have come before it drafts

    @property
    def queued(self) -> int:
        """Slots that wait."""
        return self.fed - self.cache.length

    @property
    def ready(self) -> int:
        """Slots that wait and whose next token is known."""
        return min(self.fed, len(self.tokens) - 1) - self.cache.length

    def next_tokens(self, count: int) -> list[int]:
        """The tokens after each of the first `count` waiting slots."""
        first = self.cache.length + 1
        return self.tokens[first : first + count]

    def waiting(self) -> Tensor:
        """Features of all waiting slots, [queued, features]."""
        rows = self.queue[0] if len(self.queue) == 1 else torch.cat(self.queue)
        self.queue = [rows[len(rows) - self.queued :]]
        return self.queue[0]

    def keep(self, count: int, last: Tensor | None) -> None:
        """The first `count` waiting slots are in the cache now; `last`: the head's output at the last of them."""
        self.last = last
        self.cache.commit(count)  # an interruption after this loses nothing: `waiting` drops what the cache holds
        if self.queued == 0:
            self.queue.clear()
        if self.media is not None and self.cache.length >= self.media.stop:
            self.media = None


class MtpDrafter(Drafter):
    """Drafts for all sequences together: one catch-up pass, then one pass per depth after the first."""

    name = "mtp"
    wants_features = True

    def __init__(self, head: MtpHead, pool: PagePool, vocab: int, chunk: int) -> None:
        self.head, self.pool, self.vocab, self.chunk = head, pool, vocab, chunk
        self._passes = _host_passes(head, pool)
        self._states: dict[int, State] = {}  # whoever was served last comes last
        self._held: set[int] = set()  # by a device: their pages stay where they are

    def target_changed(self, target: Decoder, output: Matrix) -> None:
        """Its target has new weights: what the head shares with it. `output`: the matrix that the target had."""
        head = self.head
        head.embedding = target.embedding
        if head.output is output:
            head.output = target.head
        elif head.vocabulary is not None:
            head.output = head.kernels.matrix(target.output_rows(head.vocabulary).to(target.dtype), None)
        self._passes = _host_passes(head, self.pool)  # recordings know where weights are

    def open(self, sequence_id: int, tokens: list[int], media: PromptMedia | None = None) -> None:
        shown = None if media is None else media.one_earlier()
        self._states[sequence_id] = State(SequenceCache(self.pool), list(tokens), shown)

    def open_late(self, sequence_id: int, pending: int) -> None:
        """Positions are told from each other by their distance alone, so that the first slot may stand anywhere."""
        self.open(sequence_id, [pending])
        self._states[sequence_id].least = LATE

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        self._states[sequence_id].tokens += tokens

    def feed(self, sequence_id: int, features: Tensor) -> None:
        """Queue the features; a long queue, a prompt's above all, is worked off at once."""
        state = self._states[sequence_id]
        state.queue.append(features.clone())
        state.fed += len(features)
        if state.queued > MOST_QUEUED:
            self._serve(sequence_id)
            if not self._make_room(state, state.fed, [state]):
                raise MemoryError("the head's cache is full")
            self._prefill(state)

    def join(self, sequence_id: int, slots: int) -> tuple[list[int], Waiting | None] | None:
        """A device takes over: pages for `slots` slots and what it must fill in there; None when there is no room."""
        state = self._serve(sequence_id)
        if not self._make_room(state, slots, [state]):
            return None
        self._prefill(state)
        count, start = state.ready, state.cache.length
        if start + count != len(state.tokens) - 1:
            raise RuntimeError(f"{len(state.tokens)} tokens came with features of {state.fed} positions")
        waiting = Waiting(start, state.waiting()[:count], state.next_tokens(count)) if count else None
        state.keep(count, None)
        self._held.add(sequence_id)
        return state.cache.pages, waiting

    def grow(self, sequence_id: int, slots: int) -> list[int] | None:
        """Pages for `slots` slots of a sequence that a device holds; None when there is no room."""
        state = self._states.get(sequence_id)
        return state.cache.pages if state is not None and self._make_room(state, slots, [state]) else None

    def leave(self, sequence_id: int, length: int) -> None:
        """The device has filled in the slots before `length`. Its last output is lost: one round has no draft."""
        state = self._states[sequence_id]
        self._held.discard(sequence_id)
        state.cache.length = state.fed = length
        state.last = None
        state.queue.clear()

    def is_open(self, sequence_id: int) -> bool:
        """Is it followed?"""
        return sequence_id in self._states

    def ready(self, sequence_id: int) -> int:
        state = self._states.get(sequence_id)
        return state is not None and state.fed >= state.least

    def device_half(self, slots: SlotTensors, capture: Capture) -> MtpDeviceHalf:
        """See `draft/mtp_device.py`."""
        return MtpDeviceHalf(self, slots, capture)

    def close(self, sequence_id: int) -> None:
        self._held.discard(sequence_id)
        state = self._states.pop(sequence_id, None)
        if state is not None:
            state.cache.release()

    def propose(self, wants: list[Want]) -> list[Draft]:
        states = [self._serve(want.sequence_id) for want in wants]
        for state in states:
            if state.fed != len(state.tokens) - 1:
                raise RuntimeError(f"{len(state.tokens)} tokens came with features of {state.fed} positions")
        # Who has no place now, or no output to go on from, drafts nothing in this round.
        placed = [
            (s.ready > 0 or s.last is not None) and self._make_room(s, s.fed + want.depth, states)
            for s, want in zip(states, wants, strict=True)
        ]
        return draft_for_some(wants, placed, self._draft)

    def _draft(self, wants: list[Want]) -> list[Draft]:
        """Draw tokens depth by depth. Entries written on the way are provisional: lengths go back at the end."""
        states = [self._states[want.sequence_id] for want in wants]
        self._catch_up(states)
        drawing = Drawing(wants, self.vocab, self.head.vocabulary)
        lengths = [state.cache.length for state in states]
        outputs = [state.last for state in states]  # of the newest slot of each sequence
        try:
            for depth in range(max(want.depth for want in wants)):
                live = drawing.live(depth)
                if not live:
                    break
                hidden = torch.stack([row for index in live if (row := outputs[index]) is not None])
                if depth:
                    work = [(states[index].cache, drawing.tokens[index][-1:]) for index in live]
                    hidden = self._passes.forward(hidden, make_pass(work, last_only=False))
                    for index, row in zip(live, hidden, strict=True):
                        outputs[index] = row
                        states[index].cache.commit(1)
                drawing.draw(live, self._passes.logits(hidden))
        finally:
            for state, length in zip(states, lengths, strict=True):
                state.cache.rewind(length)
        return drawing.drafts()

    def _catch_up(self, states: list[State]) -> None:
        """Run the waiting slots of all sequences; long queues first, each in passes of its own."""
        for state in states:
            self._prefill(state)
        work = [(state, state.ready) for state in states if state.ready]
        if work:
            self._pass(work)

    def _prefill(self, state: State) -> None:
        """Fill a long queue in, all but its last slots: drafts begin at the output of the very last.

        Media are seen here alone, so that a queue with some is filled in however short it is.
        """
        while state.ready > (FEW if state.media is None else 1):
            count = min(state.ready - 1, self.chunk)
            features = self._passes.fuse(state.waiting()[:count])
            work = [(state.cache, state.next_tokens(count))]
            batch = make_pass(work, last_only=True, prefill=True, media=[state.media])
            self._passes.fill(features, batch)
            state.keep(count, None)

    def _pass(self, work: list[tuple[State, int]]) -> None:
        """Run the next slots of each sequence on the target's features."""
        batch = make_pass([(state.cache, state.next_tokens(count)) for state, count in work], last_only=True)
        features = batch.lay_out([state.waiting()[:count] for state, count in work])
        outputs = self._passes.forward(self._passes.fuse(features), batch)
        for (state, count), last in zip(work, outputs, strict=True):
            state.keep(count, last)

    def _serve(self, sequence_id: int) -> State:
        state = self._states.pop(sequence_id)
        self._states[sequence_id] = state
        return state

    def _make_room(self, state: State, slots: int, busy: list[State]) -> bool:
        """Let a sequence hold `slots` slots; those not served for long move to host memory. False when they cannot."""
        cache = state.cache
        needed = cache.missing(slots) if cache.parked is None else max(cache.parked_pages, self.pool.pages_for(slots))
        for other_id, other in self._states.items():
            if self.pool.free >= needed:
                break
            if other.cache.pages and other not in busy and other_id not in self._held:
                other.cache.park()
        if self.pool.free < needed:
            return False
        if cache.parked is not None:
            cache.unpark()
        cache.grow(slots)
        return True


def _host_passes(head: MtpHead, pool: PagePool) -> MtpHead | RecordedHead:
    """What runs the head on the host; on other devices the head itself."""
    if pool.on_device or pool.device.type != "cpu":
        return head
    from forerun.models.recorded import head_of  # needs llvmlite, which a machine with a GPU may lack

    return head_of(head, pool)
