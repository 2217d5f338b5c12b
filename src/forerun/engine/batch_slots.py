"""The batch slots of a device: the sequences of its rounds, in buffers that captured graphs read and write.

Between rounds the device alone knows how far each slot has come; the host follows a step behind. A sequence that joins
or leaves changes its own slot and nothing else: the others keep their slots and their drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.cache.groups import HOLE
from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.protocol import Capture, DeviceHalf
from forerun.engine.drafters import Drafters
from forerun.engine.graphs import batch_size_for
from forerun.engine.sequence import Sequence
from forerun.kernels.interface import WIDEST
from forerun.kernels.packed import Packed
from forerun.sample.masks import Masks, words_of
from forerun.sample.noise import split_seed
from forerun.sample.reference import min_p_offset

if TYPE_CHECKING:
    from forerun.kernels.gpu.editing import EditTables
    from forerun.sample.device_edits import EditBuffers


@dataclass(slots=True)
class Occupant:
    """Who sits in a batch slot, and what the slot knows of it."""

    sequence: Sequence
    blocks: list[list[int]]  # its block tables, by page group
    recurrent: int | None
    held: int = 0  # drafts for the next round that the device has made
    stale: bool = False  # the slot is not where the host is: tokens were dropped

    @property
    def pages(self) -> int:
        """How many it holds in each group."""
        return len(self.blocks[0])


class BatchSlots:
    """What graphs read of each slot, and the occupants as the host knows them; a drafter's device half in step."""

    def __init__(self, most: int, pages: int, pool: PagePool, drafters: Drafters, capture: Capture) -> None:
        """`pages`: the most a sequence may hold."""
        device = pool.device
        self.pool, self.most, self.most_pages, self.drafters, self.vocab = pool, most, pages, drafters, drafters.vocab
        self._edits: EditBuffers | None = None  # made when the first sequence with edits joins
        self.occupants: dict[int, Occupant] = {}
        whole, real, small = torch.int64, torch.float64, torch.int32
        self._drafts = Packed(device, {"tokens": (whole, (WIDEST - 1, most)), "counts": (small, (most,))})
        self.drafts = self._drafts.there["tokens"]  # by depth
        self.drafted = self._drafts.there["counts"]  # real ones among them
        # What a request asks for: the host writes it, the device only reads it.
        self._asked = Packed(
            device,
            {
                "seed": (whole, (most, 3)),
                **dict.fromkeys(("temperature", "top_p", "min_p_offset"), (real, (most,))),
                **dict.fromkeys(("live", "recurrent", "top_k"), (small, (most,))),
                **{f"table {group}": (small, (most, pages)) for group in range(len(pool.groups))},
            },
        )
        asked = self._asked.there
        self.seed, self.live, self.recurrent = asked["seed"], asked["live"], asked["recurrent"]
        self.temperature, self.top_p = asked["temperature"], asked["top_p"]
        self.top_k, self.min_p_offset = asked["top_k"], asked["min_p_offset"]
        # Where a sequence stands: the device moves on from what the host puts in.
        self._put = Packed(device, {"pending": (whole, (most,)), "position": (small, (most,)), "new": (small, (most,))})
        self.pending = torch.zeros(most, dtype=whole, device=device)
        self.position = torch.zeros(most, dtype=small, device=device)  # tokens in the cache
        self.tables = [asked[f"table {group}"] for group in range(len(pool.groups))]
        self._asked.here["recurrent"].fill(pool.spare_slot)
        self._asked.here["top_p"].fill(1)
        for slot in range(most):
            self._turn_pages(slot, None)
        self._asked.send()
        halves = [drafter.device_half(self, capture) for drafter in drafters.by_name.values()]
        self.half: DeviceHalf | None = next((half for half in halves if half is not None), None)

    def slot_of(self, sequence: Sequence) -> int | None:
        """Where it sits."""
        return next((slot for slot, one in self.occupants.items() if one.sequence is sequence), None)

    @property
    def in_use(self) -> int:
        """Slots up to the last one that is taken."""
        return 1 + max(self.occupants, default=-1)

    def changes(self, sequences: list[Sequence]) -> bool:
        """Would `assign` let anybody join or leave?"""
        staying = {id(one.sequence) for one in self.occupants.values() if not one.stale}
        return staying != {id(sequence) for sequence in sequences}

    def assign(self, sequences: list[Sequence]) -> list[int]:
        """The slot of each of them; everybody else leaves."""
        staying = {id(sequence) for sequence in sequences}
        small = batch_size_for(max(1, len(sequences)))  # slots of the smallest graphs that hold all of them
        taken = {id(one.sequence): slot for slot, one in self.occupants.items() if id(one.sequence) in staying}
        taken = {who: slot for who, slot in taken.items() if slot < small}  # others move to where somebody left
        leaving = set(self.occupants) - set(taken.values())
        joining = {  # again, as the host knows it
            slot: self.occupants[slot].sequence
            for slot in taken.values()
            if self.occupants[slot].stale or not self._follow_pages(slot)
        }
        free = iter(sorted(set(range(self.most)) - set(taken.values())))
        for sequence in sequences:
            if id(sequence) not in taken:
                taken[id(sequence)] = slot = next(free)
                joining[slot] = sequence
        if leaving or joining:
            self._change(joining, leaving)
        return [taken[id(sequence)] for sequence in sequences]

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """These leave their slots."""
        found = {slot for sequence in sequences if (slot := self.slot_of(sequence)) is not None}
        if found:
            self._change({}, found)

    def _follow_pages(self, slot: int) -> bool:
        """Take over pages that its sequence got; its drafts stay. False when the sequence was moved."""
        occupant = self.occupants[slot]
        cache = occupant.sequence.cache
        if cache.slot != occupant.recurrent or not cache.still_holds(occupant.blocks):
            return False  # it was parked and came back elsewhere
        if len(cache.pages) > occupant.pages:
            occupant.blocks = [list(held) for held in cache.blocks]
            self._turn_pages(slot, cache)
            self._asked.send()
            half, has_room = self.half, False
            if half is not None and half.follows(slot):
                with self.drafters.guarded(occupant.sequence, half.name):
                    has_room = half.grow(slot, len(cache.pages) * self.pool.page)
                if not has_room:
                    self._half_leaves(slot, occupant.sequence)
        return True

    def _change(self, joining: dict[int, Sequence], leaving: set[int]) -> None:
        for slot in {*leaving, *joining} & set(self.occupants):
            self._half_leaves(slot, self.occupants[slot].sequence)
        self._write(joining, leaving - set(joining))
        half = self.half
        for slot, sequence in joining.items():
            if half is not None and half.name in sequence.arms:
                with self.drafters.guarded(sequence, half.name):
                    self.drafters.tell(sequence, half.name)
                    half.join(slot, sequence.id, len(sequence.cache.pages) * self.pool.page)

    def _half_leaves(self, slot: int, sequence: Sequence) -> None:
        """The host half goes on from where the sequence stands, unless it was closed."""
        half = self.half
        if half is not None and half.follows(slot) and half.name in sequence.told:
            with self.drafters.guarded(sequence, half.name):
                self.drafters.tell(sequence, half.name)
                half.leave(slot, sequence.cache.length)
        if half is not None and half.follows(slot):  # it was closed, or failed
            half.leave(slot, None)

    def _write(self, joining: dict[int, Sequence], leaving: set[int]) -> None:
        """Put sequences into slots as the host knows them, without drafts; slots that are left idle."""
        asked, put = self._asked.here, self._put.here
        put["new"].fill(0)
        for slot in leaving:
            del self.occupants[slot]
            put["new"][slot], put["pending"][slot], put["position"][slot] = 1, 0, 0
            asked["live"][slot], asked["recurrent"][slot] = 0, self.pool.spare_slot
            asked["temperature"][slot] = asked["top_k"][slot] = 0
            self._turn_pages(slot, None)
            if self._edits is not None:
                self._edits.clear(slot)
        for slot, sequence in joining.items():
            params, cache = sequence.request.sampling, sequence.cache
            self.occupants[slot] = Occupant(sequence, [list(held) for held in cache.blocks], cache.slot)
            put["new"][slot], put["pending"][slot], put["position"][slot] = 1, sequence.pending, cache.length
            asked["live"][slot] = 1
            asked["recurrent"][slot] = self.pool.spare_slot if cache.slot is None else cache.slot
            # The best token alone survives a top-k of 1: no noise is needed to find it, nor to draft it.
            asked["temperature"][slot] = 0.0 if params.top_k == 1 else params.temperature
            asked["top_k"][slot] = 0 if params.greedy else params.top_k
            asked["top_p"][slot], asked["min_p_offset"][slot] = params.top_p, min_p_offset(params)
            asked["seed"][slot] = [*split_seed(params.seed), params.choice]
            self._turn_pages(slot, cache)
            if self._edits is not None or params.needs_edits:
                self.make_edits().join(slot, params, sequence.history)
        self._asked.send()
        self._put.send()
        new = self._put.there["new"].bool()
        for tensor, name in ((self.pending, "pending"), (self.position, "position")):
            torch.where(new, self._put.there[name], tensor, out=tensor)
        self.drafted.masked_fill_(new, 0)

    @property
    def edits(self) -> EditTables | None:
        """What biases, penalties and masks change in the logits of each slot."""
        return None if self._edits is None else self._edits.tables

    def mask(self, slot: int, masks: Masks | None) -> None:
        """What the rows of a slot allow in the next round; None: everything."""
        if masks is not None or self._edits is not None:
            self.make_edits().mask(slot, np.empty((0, words_of(self.vocab)), np.int32) if masks is None else masks)

    def make_edits(self) -> EditBuffers:
        """The buffers of edits; a round that edits is captured with them, so they must be there before."""
        if self._edits is None:
            from forerun.sample.device_edits import EditBuffers  # needs Triton

            self._edits = EditBuffers(self.most, self.vocab, self.pool.device)
        return self._edits

    def _turn_pages(self, slot: int, cache: SequenceCache | None) -> None:
        """Write its block tables here; they are sent with the rest."""
        spare = self.pool.spare_page
        for group in range(len(self.pool.groups)):
            row = self._asked.here[f"table {group}"][slot]
            held = [] if cache is None else [spare if page == HOLE else page for page in cache.blocks[group]]
            row[: len(held)] = held
            row[len(held) :] = spare

    def give(self, drafts: dict[int, list[int]]) -> None:
        """Drafts that the host made for some slots; the others keep those they have."""
        if not drafts:
            return
        tokens, counts = self._drafts.here["tokens"], self._drafts.here["counts"]
        for slot, mine in drafts.items():
            tokens[: len(mine), slot] = mine
            counts[slot] = len(mine)
        if len(drafts) == len(self.occupants):
            self._drafts.send()  # idle slots may get anything
            return
        slots = list(drafts)
        given = torch.from_numpy(tokens[:, slots]), torch.from_numpy(counts[slots])
        there = torch.tensor(slots).to(self.drafts.device, non_blocking=True)
        self.drafts[:, there] = given[0].to(self.drafts.device, non_blocking=True)
        self.drafted[there] = given[1].to(self.drafts.device, non_blocking=True)

    def idle_values(self) -> list[tuple[Tensor, int]]:
        """What graphs read or change of each slot, and what that is while nobody sits there."""
        zeros = self.live, self.position, self.pending, self.drafted, self.drafts
        tables = [(table, self.pool.spare_page) for table in self.tables]
        return [*((tensor, 0) for tensor in zeros), (self.recurrent, self.pool.spare_slot), *tables]
