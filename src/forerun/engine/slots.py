"""The batch slots of a device: the sequences of its rounds, in buffers that captured graphs read and write.

Between rounds the device alone knows how far each slot has come; the host follows a step behind. A sequence that joins
or leaves changes its own slot and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from forerun.cache.groups import HOLE
from forerun.cache.pages import PagePool, SequenceCache
from forerun.engine.sequence import Sequence
from forerun.kernels.interface import WIDEST
from forerun.kernels.packed import Packed
from forerun.sample.masks import Masks, words_of
from forerun.sample.noise import split_seed
from forerun.sample.reference import min_p_offset

if TYPE_CHECKING:
    from forerun.kernels.gpu.editing import EditTables
    from forerun.sample.device_edits import EditBuffers

SLOTS = 64  # sequences of a round


@dataclass(slots=True)
class Occupant:
    """The sequence in a batch slot, and what the slot knows of it."""

    sequence: Sequence
    blocks: list[list[int]]  # its block tables, by page group
    recurrent: int | None
    limit: int  # tokens at which its answer ends
    version: int  # of the pages that its sequence holds
    stale: bool = False  # the slot is not where the host is


class BatchSlots:
    """What graphs read of each slot, and the occupants as the host knows them. Line `SLOTS` belongs to no sequence: its
    pages are all spare.
    """

    def __init__(self, pages: int, pool: PagePool, vocab: int, features: int, dtype: torch.dtype) -> None:
        """`pages`: the most a sequence may hold; `features`: columns of what drafters read of a position."""
        device, lines = pool.device, SLOTS + 1
        self.pool, self.most_pages, self.vocab = pool, pages, vocab
        self._edits: EditBuffers | None = None  # made when the first sequence with edits joins
        self.occupants: dict[int, Occupant] = {}
        self._places: dict[int, int] = {}  # by a sequence's id
        whole, real, small = torch.int64, torch.float64, torch.int32
        # What a request asks for: the host writes it, the device only reads it.
        self._asked = Packed(
            device,
            {
                "seed": (whole, (lines, 3)),
                **dict.fromkeys(("temperature", "top_p", "min_p_offset", "drafting"), (real, (lines,))),
                **dict.fromkeys(("recurrent", "top_k", "limit"), (small, (lines,))),
                **{f"table {group}": (small, (lines, pages)) for group in range(len(pool.groups))},
            },
        )
        asked = self._asked.there
        self.seed, self.recurrent, self.limit = asked["seed"], asked["recurrent"], asked["limit"]
        self.temperature, self.top_p = asked["temperature"], asked["top_p"]
        self.top_k, self.min_p_offset = asked["top_k"], asked["min_p_offset"]
        self.drafting = asked["drafting"]  # the temperature at which drafts are drawn
        # Where a sequence stands: the device moves on from what the host puts in.
        self._put = Packed(
            device, {"pending": (whole, (lines,)), "position": (small, (lines,)), "new": (small, (lines,))}
        )
        self.pending = torch.zeros(lines, dtype=whole, device=device)
        self.position = torch.zeros(lines, dtype=small, device=device)  # tokens in the cache
        self.drafts = torch.zeros(WIDEST - 1, lines, dtype=whole, device=device)
        self.last = torch.zeros(lines, max(1, features), dtype=dtype, device=device)  # features of the last kept row
        self.edges = list(self.last.unbind())  # each slot's
        self.tables = [asked[f"table {group}"] for group in range(len(pool.groups))]
        self._asked.here["recurrent"].fill(pool.spare_slot)
        self._asked.here["top_p"].fill(1)
        for slot in range(lines):
            self._turn_pages(slot, None)
        self._asked.send()

    def slot_of(self, sequence: Sequence) -> int | None:
        """Where it sits."""
        return self._places.get(sequence.id)

    def assign(self, sequences: list[Sequence]) -> list[int]:
        """The slot of each of them; all others leave. One whose last tokens the host knows moves to a lower slot where
        that makes the round smaller.
        """
        taken, joining, count = dict[int, int](), dict[int, Sequence](), len(sequences)
        grown = False
        for sequence in sequences:
            slot = self._places.get(sequence.id)
            if slot is None or (slot >= count and not sequence.is_under_way):
                continue
            taken[sequence.id], occupant = slot, self.occupants[slot]
            if occupant.stale:
                joining[slot] = sequence
            elif occupant.version != sequence.cache.version or occupant.limit != sequence.limit:
                if self._keeps_pages(slot):
                    grown = True
                else:
                    joining[slot] = sequence
        if len(taken) < count or len(self.occupants) > count:
            leaving = set(self.occupants) - set(taken.values())
            free = iter(sorted(set(range(SLOTS)) - set(taken.values())))
            for sequence in sequences:
                if sequence.id not in taken:
                    taken[sequence.id] = slot = next(free)
                    joining[slot] = sequence
        else:
            leaving = set()
        if leaving or joining:
            self._change(joining, leaving)
        elif grown:
            self._asked.send()
        return [taken[sequence.id] for sequence in sequences]

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """These leave their slots."""
        found = {self._places[sequence.id] for sequence in sequences if sequence.id in self._places}
        if found:
            self._change({}, found)

    def _keeps_pages(self, slot: int) -> bool:
        """Take over what its sequence got meanwhile. False when the sequence was moved: the slot is filled anew.

        A sequence with a round under way was not moved: where pages are others, they hold the same, from the prefix
        cache. And the host does not know where it stands.
        """
        occupant = self.occupants[slot]
        sequence, cache = occupant.sequence, occupant.sequence.cache
        stayed = cache.slot == occupant.recurrent and cache.still_holds(occupant.blocks)
        if not stayed and not sequence.is_under_way:
            return False  # it was parked and came back elsewhere
        occupant.blocks, occupant.limit, occupant.version = (
            [list(held) for held in cache.blocks],
            sequence.limit,
            cache.version,
        )
        self._asked.here["limit"][slot] = sequence.limit
        self._turn_pages(slot, cache)
        return True

    def _change(self, joining: dict[int, Sequence], leaving: set[int]) -> None:
        """Put sequences into slots as the host knows them, and empty others."""
        asked, put = self._asked.here, self._put.here
        for slot in leaving:  # what was kept for the next round's drafts goes along
            cache = self.occupants[slot].sequence.cache
            if cache.edge is not None:
                cache.edge = cache.edge.clone()
        put["new"].fill(0)
        for slot in leaving:
            del self._places[self.occupants.pop(slot).sequence.id]
        for slot in leaving - set(joining):
            asked["recurrent"][slot] = self.pool.spare_slot
            asked["temperature"][slot] = asked["top_k"][slot] = 0
            self._turn_pages(slot, None)
            if self._edits is not None:
                self._edits.clear(slot)
        for slot, sequence in joining.items():
            self._join(slot, sequence)
        self._asked.send()
        self._put.send()
        new = self._put.there["new"].bool()
        for tensor, name in ((self.pending, "pending"), (self.position, "position")):
            torch.where(new, self._put.there[name], tensor, out=tensor)
        for slot, sequence in joining.items():
            edge = sequence.cache.edge
            if edge is None:
                self.last[slot].zero_()
            else:
                self.last[slot].copy_(edge)
                sequence.cache.edge = self.edges[slot]

    def _join(self, slot: int, sequence: Sequence) -> None:
        asked, put, params, cache = self._asked.here, self._put.here, sequence.request.sampling, sequence.cache
        recurrent = self.pool.spare_slot if cache.slot is None else cache.slot
        blocks = [list(held) for held in cache.blocks]
        self.occupants[slot] = Occupant(sequence, blocks, cache.slot, sequence.limit, cache.version)
        self._places[sequence.id] = slot
        # Of one that reads its prompt the place of the last row: its token is chosen there.
        reads = len(sequence.tokens) == sequence.prompt_length
        put["new"][slot], put["pending"][slot] = 1, sequence.pending
        put["position"][slot] = sequence.prompt_length - 1 if reads else cache.length
        asked["recurrent"][slot], asked["limit"][slot] = recurrent, sequence.limit
        # The best token alone survives a top-k of 1: no noise is needed to find it, nor to draft it.
        heat = 0.0 if params.top_k == 1 else params.temperature
        asked["temperature"][slot] = heat
        # Drafts that rejection judges are the likeliest tokens: their distribution is known without the device.
        asked["drafting"][slot] = 0.0 if sequence.request.accept == "rejection" else heat
        asked["top_k"][slot] = 0 if params.greedy else params.top_k
        asked["top_p"][slot], asked["min_p_offset"][slot] = params.top_p, min_p_offset(params)
        asked["seed"][slot] = [*split_seed(params.seed), params.choice]
        self._turn_pages(slot, cache)
        if self._edits is not None or params.needs_edits:
            self.make_edits().join(slot, params, sequence.history)

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

            self._edits = EditBuffers(SLOTS + 1, self.vocab, self.pool.device)
        return self._edits

    def _turn_pages(self, slot: int, cache: SequenceCache | None) -> None:
        """Write its block tables here; they are sent with the rest."""
        spare = self.pool.spare_page
        for group in range(len(self.pool.groups)):
            row = self._asked.here[f"table {group}"][slot]
            held = [] if cache is None else [spare if page == HOLE else page for page in cache.blocks[group]]
            row[: len(held)] = held
            row[len(held) :] = spare
