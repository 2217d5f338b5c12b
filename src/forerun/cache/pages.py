"""The pool of key/value pages and of recurrent state, and one sequence's share of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache.chain import NO_ENTRIES, Entries, Found, PageChain
from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.groups import HOLE, PageGroup
from forerun.cache.prefix import PrefixIndex
from forerun.cache.recurrent import SlotContents, StateSlots
from forerun.kernels.interface import AttentionSpec, DeltaLayout, LayerPages, Staged

Parts = Mapping[str, Sequence[AttentionSpec]]  # by drafter: its layers that keep keys and values
NO_PARTS: Parts = MappingProxyType({})
MAX_SLOTS = 64  # sequences whose recurrent state is held at once, when memory allows
MAX_STATES = 32  # recurrent states that stay in the prefix cache, when memory allows
SLOT_SHARE = 0.5  # of the cache's memory, at most, that goes to recurrent state
STATE_SHARE = 0.25  # of that to states in the prefix cache


class CacheShape(Protocol):
    """What a model's config says about the state it keeps."""

    @property
    def attention(self) -> Sequence[AttentionSpec]:
        """Of the layers that keep keys and values, in order."""
        ...

    @property
    def delta(self) -> DeltaLayout | None: ...

    @property
    def recurrent_layers(self) -> int: ...


def token_bytes(attention: Sequence[AttentionSpec], dtype: torch.dtype) -> int:
    """Of the keys and values of one token in all these layers."""
    return sum(2 * spec.layout.kv_heads * spec.layout.size for spec in attention) * dtype.itemsize


class PagePool:
    """Pages of keys and values for all attention layers, and slots for the state of recurrent ones.

    Layers whose keys and values have the same shape and window share a group. A sequence has a block table in each, all
    of the same length; what differs is which pages it has given back. The layers of drafters are among them: an entry
    of theirs stands at the position of its token, so that whatever moves or shares a page takes it along.
    """

    def __init__(
        self,
        attention: Sequence[AttentionSpec],
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateSlots | DeviceStates | None = None,
        on_device: bool = False,
        parts: Parts = NO_PARTS,
    ) -> None:
        """`on_device`: rows that pad a pass go to a spare page."""
        assert page & (page - 1) == 0, "attention halves pages"
        self.page, self.count, self.device, self.states = page, pages, device, states
        self.on_device, self.parked_bytes = on_device, 0  # of copies in host memory
        every = [*attention, *chain.from_iterable(parts.values())]
        kinds = [(spec.layout.kv_heads, spec.layout.size, spec.window) for spec in every]
        self.groups = [
            PageGroup(number, every[kinds.index(kind)], kinds.count(kind), pages, page, dtype, device, on_device)
            for number, kind in enumerate(dict.fromkeys(kinds))
        ]
        self.has_windows = any(group.window for group in self.groups)
        self.prefix = PrefixIndex(self.groups, states, page)
        of_kind = {kind: iter(group.layers) for kind, group in zip(dict.fromkeys(kinds), self.groups, strict=True)}
        layers = iter([next(of_kind[kind]) for kind in kinds])
        self.layers: list[LayerPages] = list(islice(layers, len(attention)))  # of the target
        self.parts = {name: list(islice(layers, len(specs))) for name, specs in parts.items()}  # of drafters

    @classmethod
    def for_model(
        cls,
        shape: CacheShape,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = MAX_SLOTS,
        on_device: bool = False,
        parts: Parts = NO_PARTS,
    ) -> PagePool:
        """A pool for a model: pages for its attention layers, and slots when it has recurrent ones."""
        kind = DeviceStates if on_device else StateSlots
        states = None if shape.delta is None else kind(shape.delta, shape.recurrent_layers, slots, device)
        return cls(shape.attention, pages, page, dtype, device, states, on_device, parts)

    @classmethod
    def within(
        cls,
        shape: CacheShape,
        tokens: int | None,
        page: int,
        memory: int,
        dtype: torch.dtype,
        device: torch.device,
        on_device: bool = False,
        parts: Parts = NO_PARTS,
        prefix_cache: bool = True,
    ) -> PagePool | None:
        """A pool for up to `tokens` tokens in up to `memory` bytes; None when that is too little to run at all.

        `prefix_cache`: recurrent states may stay after their sequences.
        """
        slots = states = 0
        if shape.delta is not None:
            kind = DeviceStates if on_device else StateSlots
            each = kind.bytes_per_slot(shape.delta, shape.recurrent_layers)
            room = int(memory * SLOT_SHARE) // each - on_device
            states = min(MAX_STATES, int(room * STATE_SHARE)) if prefix_cache else 0
            slots = min(MAX_SLOTS, room - states)
            memory -= (slots + on_device + states) * each
            if slots < 2:  # the exactness probe runs two sequences side by side
                return None
        every = [*shape.attention, *chain.from_iterable(parts.values())]
        pages = memory // (token_bytes(every, dtype) * page)
        if tokens is not None:
            pages = min(pages, tokens // page)
        if pages < 2:
            return None
        pool = cls.for_model(shape, pages, page, dtype, device, slots, on_device, parts)
        pool.prefix.most_states = states
        return pool

    @property
    def spare_page(self) -> int:
        """Where a device writes what nobody keeps."""
        return self.count

    @property
    def spare_slot(self) -> int:
        """The recurrent state of batch slots that idle."""
        return 0 if self.states is None else self.states.count

    @property
    def free_slots(self) -> int:
        """Sequences that can still start."""
        return MAX_SLOTS if self.states is None else self.states.free

    @property
    def free(self) -> int:
        """Pages that a sequence could still take, in every group: those of texts that no sequence uses are free too."""
        return min(group.free for group in self.groups) + self.prefix.idle

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens, in each group."""
        return -(-tokens // self.page)

    def recount(self, owners: list[SequenceCache]) -> None:
        """Free what an interruption left without an owner."""
        self.prefix.recount([owner.chain for owner in owners if owner.chain is not None])
        for number, group in enumerate(self.groups):
            group.recount([*(page for owner in owners for page in owner.blocks[number]), *self.prefix.held(number)])
        if self.states is not None:
            self.states.recount([owner.slot for owner in owners if owner.slot is not None])
        for owner in owners:
            owner.follow_blocks()

    def check(self, owners: list[SequenceCache]) -> None:
        """Every page is held by those who have it in their block table, and every slot has one owner or is free."""
        self.prefix.check([owner.chain for owner in owners if owner.chain is not None])
        for number, group in enumerate(self.groups):
            group.check([*(page for owner in owners for page in owner.blocks[number]), *self.prefix.held(number)])
        if self.states is not None:
            slots = [owner.slot for owner in owners if owner.slot is not None] + self.states.unowned
            assert sorted(slots) == list(range(self.states.count)), "a slot was lost or handed out twice"
        parked = sum(owner.parked.bytes for owner in owners if owner.parked is not None)
        assert self.parked_bytes == parked, "copies in host memory are counted wrongly"


@dataclass(slots=True)
class Parked:
    """Copies of a sequence's pages in host memory, bits unchanged. Pages that were only reserved are not copied."""

    blocks: list[list[int]]  # by group, as they were: what counts is where holes are
    contents: list[tuple[Tensor, Tensor]]  # by group keys and values of the pages that were written
    state: SlotContents | None

    @property
    def bytes(self) -> int:
        """Host memory it takes."""
        tensors = [tensor for both in self.contents for tensor in both]
        if self.state is not None:
            tensors += [tensor for layer in self.state.layers for tensor in layer]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(slots=True)
class Snapshot:
    """A point to go back to, for as long as the pages of the tokens before it are held."""

    length: int
    state: SlotContents | None


class SequenceCache:
    """Keys, values and state of one sequence. Rows written past `length` do not exist until `commit` keeps them.

    Pages that no row to come sees are given back on the way, but those a round of `WIDEST` rows may be rolled back to.
    A second Ctrl-C may come between any two lines. It may leave pages to nobody, until they are counted again, but
    never two holders to one: what is given back is forgotten first.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.length = 0
        self.blocks: list[list[int]] = []  # the block table of each group: pages, or holes where some were given back
        self._tables: list[Tensor] | None = None  # the same [blocks] int32, made when a pass of the host asks
        self._kept: list[int] = []  # by group: the first block that was not given back
        self.slot: int | None = None
        self._passed = False  # a pass was made whose rows are neither kept nor forgotten yet
        self._staged: Staged | None = None  # where it left its state, if it was too wide to record
        self.edge: Tensor | None = None  # [features] of the last kept row, from which a head goes on
        self.parked: Parked | None = None
        self.version = 0  # counts the times that its block tables changed
        self.chain: PageChain | None = None  # where full pages stay after the sequence
        self._own([[] for _ in pool.groups])

    @property
    def pages(self) -> list[int]:
        """The block table of the first group. All are of the same length."""
        return self.blocks[0]

    @property
    def room(self) -> int:
        """Tokens that its pages hold."""
        return len(self.blocks[0]) * self.pool.page

    def still_holds(self, blocks: list[list[int]]) -> bool:
        """Are these, once the beginning of every group's block table, where they were? Holes may have come."""
        pairs = (pair for both in zip(self.blocks, blocks, strict=True) for pair in zip(*both, strict=False))
        return all(now in (before, HOLE) for now, before in pairs)

    def missing(self, tokens: int) -> int:
        """Pages still to be taken in each group before `tokens` fit."""
        return max(0, self.pool.pages_for(tokens) - len(self.pages))

    def grow(self, tokens: int) -> None:
        """Hold pages for `tokens` tokens in all, and a slot."""
        if self.slot is None and self.pool.states is not None:
            self.slot = self.pool.states.take()
        count = self.missing(tokens)
        if count:
            self.pool.prefix.make_free(count)
            pairs = zip(self.blocks, self.pool.groups, strict=True)
            self._own([held + group.take(count) for held, group in pairs])

    def begin_with(self, found: Found) -> None:
        """Hold pages that have the beginning of the text, and the recurrent state after them: `chain` took them."""
        if not found.pages:
            return
        assert self.chain is not None and not self.length and not self.pages and self.slot is None
        length, states = len(found.pages) * self.pool.page, self.pool.states
        self.pool.prefix.bring_back(found.pages)
        if states is not None:
            state = self.pool.prefix.state_of(found.pages[-1])
            assert state is not None
            self.slot = states.take()
            states.put(self.slot, state)
        blocks = []
        for number, group in enumerate(self.pool.groups):
            first = group.first_kept(length)
            blocks.append([HOLE] * first + [page.pages[number] for page in found.pages[first:]])
            group.share(blocks[-1][first:])
        self._own(blocks)
        self.length, self.edge = length, found.pages[-1].edge
        self.chain.leave_first(min(self._kept))

    def cut(self, start: int, stop: int) -> int:
        """Where a pass over the prompt from `start` on that may end at `stop` ends."""
        return stop if self.chain is None else self.chain.cut(start, stop)

    def keeps_state(self, at: int) -> bool:
        """Does recurrent state stay that was reached after so many tokens of the prompt?"""
        return self.chain is not None and at in self.chain.checkpoints

    def entries(self) -> dict[str, int]:
        """Row drafters whose entries came with the first pages, and the position from which they are all there."""
        return {} if self.chain is None else self.chain.entries()

    def follow_blocks(self) -> None:
        """The tables that passes read are those of the pages that it holds."""
        self._own(self.blocks)

    def _own(self, blocks: list[list[int]]) -> None:
        self.blocks = blocks
        self._kept = [next((at for at, page in enumerate(held) if page != HOLE), 0) for held in blocks]
        self._changed()

    def _changed(self) -> None:
        self._tables = None
        self.version += 1

    @property
    def tables(self) -> list[Tensor]:
        """The block tables, each [blocks] int32."""
        if self._tables is None:
            self._tables = [torch.tensor(held, dtype=torch.int32, device=self.pool.device) for held in self.blocks]
        return self._tables

    def _disown(self) -> None:
        blocks = self.blocks
        self._own([[] for _ in blocks])
        for held, group in zip(blocks, self.pool.groups, strict=True):
            group.give_back(held)

    def _leave_unseen(self) -> None:
        """Give back the pages that fell out of their layers' window."""
        if not self.pool.has_windows:
            return
        for number, group in enumerate(self.pool.groups):
            first, last = self._kept[number], group.first_kept(self.length)
            if last > first:
                held, self._kept[number] = self.blocks[number], last
                unseen, held[first:last] = held[first:last], [HOLE] * (last - first)
                group.give_back(unseen)
                self._tables = None
        if self.chain is not None:
            self.chain.leave_first(min(self._kept))

    def begin(self, count: int, prompt: bool) -> Staged | None:
        """The next pass has `count` rows of this sequence, of its prompt or generated ones. Returns where it leaves
        recurrent state, if not recorded.
        """
        states = self.pool.states
        if states is not None:
            assert self.slot is not None, "grow comes first"
            self._passed, self._staged = True, states.stage(self.slot, count, prompt)
        return self._staged

    def commit(self, count: int, features: Tensor | None = None, entries: Entries = NO_ENTRIES) -> None:
        """Keep `count` of the rows just written, forget the rest. features [rows, …] of those rows: the last of a page
        stays with it, if the page stays after the sequence. `entries`: by row drafter, where its true ones begin.
        """
        assert count >= 0 and self.length + count <= len(self.pages) * self.pool.page
        recorded = self._staged is None
        if self.pool.states is not None:
            assert self._passed and self.slot is not None, "a commit follows a pass"
            self.pool.states.commit(self.slot, self._staged, count)
            self._passed, self._staged = False, None
        before = self.length
        self.length += count
        self._publish(count, entries, features)
        chain, states = self.chain, self.pool.states
        if chain is not None and isinstance(states, StateSlots) and self.slot is not None:
            page, at = chain.state_due(before, self.length), self.length // chain.index.stride * chain.index.stride
            if page is not None and (recorded or at == self.length):
                chain.keep_state(page, at, states.copy(self.slot, self.pool.device, at - before if recorded else None))
        self._leave_unseen()

    def _publish(self, count: int, entries: Entries, features: Tensor | None = None) -> None:
        """The last `count` rows were committed: their full pages stay after the sequence."""
        chain = self.chain
        if chain is None or self.length < chain.due:
            return
        if chain.publish(self.blocks, self.length - count, self.length, features, entries):
            self._changed()

    def committed(self, count: int, entries: Entries = NO_ENTRIES) -> None:
        """A device has kept so many of the generated rows that it wrote, without the host."""
        if isinstance(self.pool.states, DeviceStates):
            assert self.slot is not None
            self.pool.states.committed(self.slot)
        self.length += count
        self._publish(count, entries)
        self._leave_unseen()

    def has_read(self, count: int, entries: Entries = NO_ENTRIES, state: SlotContents | None = None) -> None:
        """A device has read so many rows of a prompt. `state`: the recurrent one after them, where it is to stay."""
        self.length += count
        self._publish(count, entries)
        if self.chain is not None and state is not None:
            page = self.chain.state_due(self.length - count, self.length)
            if page is not None:
                self.chain.keep_state(page, self.length, state)
        self._leave_unseen()

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on, long committed ones included: only where nothing is recurrent."""
        assert self.pool.states is None and length <= self.length, "recurrent state goes back to snapshots only"
        self._go_back(length)

    def still_sees(self, position: int, groups: Iterable[int]) -> bool:
        """Are the pages held, in these groups, that rows from `position` on see and write?"""
        return all(self._kept[number] <= self.pool.groups[number].first_needed(position) for number in groups)

    def snapshot(self) -> Snapshot:
        """Where the sequence stands between two passes."""
        states, slot = self.pool.states, self.slot
        state = None if states is None or slot is None else states.copy(slot, self.pool.device)
        return Snapshot(self.length, state)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of the same sequence."""
        if snapshot.state is not None:
            assert self.pool.states is not None and self.slot is not None
            self.pool.states.put(self.slot, snapshot.state)
        self._go_back(snapshot.length)
        self._passed, self._staged = False, None

    def _go_back(self, length: int) -> None:
        assert self.still_sees(length, range(len(self.blocks))), "what it would see was given back"
        self.length = length

    def release(self) -> None:
        """Give all pages and the slot back."""
        self._disown()
        chain, self.chain = self.chain, None
        if chain is not None:
            chain.release()
        self._leave_slot()
        self._forget_copies()
        self.length, self.edge = 0, None

    def _leave_slot(self) -> None:
        slot, self.slot, self._passed, self._staged = self.slot, None, False, None
        if slot is not None and self.pool.states is not None:
            self.pool.states.give_back(slot)

    def park(self) -> None:
        """Move the contents to host memory and give pages and slot back."""
        states, slot, pairs = self.pool.states, self.slot, zip(self.blocks, self.pool.groups, strict=True)
        written = self.pool.pages_for(self.length)
        contents = [group.copy([page for page in held[:written] if page != HOLE]) for held, group in pairs]
        state = None if states is None or slot is None else states.copy(slot, torch.device("cpu"))
        parked = Parked(self.blocks, contents, state)
        self._forget_copies()  # those of one that was interrupted here
        self.parked, self.pool.parked_bytes = parked, self.pool.parked_bytes + parked.bytes
        self._disown()
        if self.chain is not None:
            self.chain.release()  # its pages are found again, or published anew, after `unpark`
        self._leave_slot()

    @property
    def parked_pages(self) -> int:
        """Pages that `unpark` will need."""
        return 0 if self.parked is None else max(len(held) - held.count(HOLE) for held in self.parked.blocks)

    def unpark(self) -> None:
        """Bring the contents back into pages of the pool, unless they are still there: `park` was interrupted."""
        parked, states = self.parked, self.pool.states
        assert parked is not None
        if not self.pages:
            blocks = []
            self.pool.prefix.make_free(self.parked_pages)
            for held, (keys, values), group in zip(parked.blocks, parked.contents, self.pool.groups, strict=True):
                pages = group.take(len(held) - held.count(HOLE))
                group.put(pages[: keys.shape[1]], keys, values)
                fresh = iter(pages)
                blocks.append([HOLE if page == HOLE else next(fresh) for page in held])
            if parked.state is not None and states is not None:
                self.slot = states.take()
                states.put(self.slot, parked.state)
            self._own(blocks)
        self._forget_copies()

    def _forget_copies(self) -> None:
        parked = self.parked
        if parked is not None:
            self.parked, self.pool.parked_bytes = None, self.pool.parked_bytes - parked.bytes
