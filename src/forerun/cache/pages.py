"""The pool of key/value pages and of recurrent state, and one sequence's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.recurrent import SlotContents, StateSlots
from forerun.kernels.interface import DeltaLayout, HeadLayout, LayerPages, Staged

MAX_SLOTS = 64  # sequences whose recurrent state is held at once, when memory allows
SLOT_SHARE = 0.5  # of the cache's memory, at most, that goes to recurrent state


class CacheShape(Protocol):
    """What a model's config says about the state it keeps."""

    @property
    def layout(self) -> HeadLayout: ...

    @property
    def attention_layers(self) -> int: ...

    @property
    def delta(self) -> DeltaLayout | None: ...

    @property
    def recurrent_layers(self) -> int: ...


class PagePool:
    """Pages of keys and values for all attention layers, and slots for the state of recurrent ones.

    Memory is reserved at once but touched only when handed out.
    """

    def __init__(
        self,
        layout: HeadLayout,
        layers: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateSlots | DeviceStates | None = None,
        on_device: bool = False,
    ) -> None:
        """`on_device`: passes are uniform, see `PassRows`; rows that nobody keeps go to a spare page."""
        assert page & (page - 1) == 0, "attention halves pages"
        self.page, self.count, self.device, self.states = page, pages, device, states
        self.on_device = on_device
        every = pages + on_device
        self._keys = torch.empty(layers, every, layout.kv_heads, layout.size, page, dtype=dtype, device=device)
        self._values = torch.empty(layers, every, layout.kv_heads, page, layout.size, dtype=dtype, device=device)
        self.layers = [LayerPages(*both) for both in zip(self._keys, self._values, strict=True)]
        if on_device:
            self._keys[:, pages], self._values[:, pages] = 0, 0
        self._free = list(reversed(range(pages)))  # the lowest number is handed out first

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
    ) -> PagePool:
        """A pool for a model: pages for its attention layers, and slots when it has recurrent ones."""
        kind = DeviceStates if on_device else StateSlots
        states = None if shape.delta is None else kind(shape.delta, shape.recurrent_layers, slots, device)
        return cls(shape.layout, shape.attention_layers, pages, page, dtype, device, states, on_device)

    @classmethod
    def within(
        cls,
        shape: CacheShape,
        tokens: int,
        page: int,
        memory: int,
        dtype: torch.dtype,
        device: torch.device,
        on_device: bool = False,
    ) -> PagePool | None:
        """A pool for up to `tokens` tokens in up to `memory` bytes; None when that is too little to run at all."""
        slots = 0
        if shape.delta is not None:
            kind = DeviceStates if on_device else StateSlots
            each = kind.bytes_per_slot(shape.delta, shape.recurrent_layers)
            slots = min(MAX_SLOTS, int(memory * SLOT_SHARE) // each - on_device)
            memory -= (slots + on_device) * each
            if slots < 2:  # the exactness probe runs two sequences side by side
                return None
        layout = shape.layout
        per_page = 2 * layout.kv_heads * layout.size * dtype.itemsize * shape.attention_layers * page
        pages = min(tokens // page, memory // per_page)
        return cls.for_model(shape, pages, page, dtype, device, slots, on_device) if pages >= 2 else None

    @property
    def spare_page(self) -> int:
        """Where a device writes what nobody keeps."""
        return self.count

    @property
    def spare_slot(self) -> int:
        """The recurrent state of lanes that idle."""
        return 0 if self.states is None else self.states.count

    @property
    def free_slots(self) -> int:
        """Sequences that can still start."""
        return MAX_SLOTS if self.states is None else self.states.free

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page)

    def take(self, count: int) -> list[int]:
        """Hand out zeroed pages: what an old owner left (NaN above all) must not reach a new one."""
        assert count <= self.free, "the scheduler hands out pages only when they are free"
        taken = [self._free.pop() for _ in range(count)]
        if not self.on_device:  # the kernels of a device mask what is not there
            for layer in self.layers:
                layer.keys[taken] = 0
                layer.values[taken] = 0
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))

    def check(self, owners: list[SequenceCache]) -> None:
        """Every page and every slot has exactly one owner or is free."""
        held = [page for owner in owners for page in owner.pages]
        assert sorted(held + self._free) == list(range(self.count)), "a page was lost or handed out twice"
        if self.states is not None:
            slots = [owner.slot for owner in owners if owner.slot is not None] + self.states.unowned
            assert sorted(slots) == list(range(self.states.count)), "a slot was lost or handed out twice"


@dataclass(slots=True)
class ParkedPages:
    """Copies of a sequence's pages in host memory, bits unchanged."""

    keys: list[Tensor]  # per layer [pages, kv heads, size, page]
    values: list[Tensor]
    state: SlotContents | None


@dataclass(slots=True)
class Snapshot:
    """A point to go back to, for as long as the pages of the tokens before it are held."""

    length: int
    state: SlotContents | None


class SequenceCache:
    """Keys, values and state of one sequence. Rows written past `length` do not exist until `commit` keeps them."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.length = 0
        self.pages: list[int] = []
        self.slot: int | None = None
        self._passed = False  # a pass was made whose rows are neither kept nor forgotten yet
        self._staged: Staged | None = None  # where it left its state, if it was too wide to record
        self.table = torch.zeros(0, dtype=torch.int32, device=pool.device)
        self.parked: ParkedPages | None = None

    def missing(self, tokens: int) -> int:
        """Pages still to be taken before `tokens` fit."""
        return max(0, self.pool.pages_for(tokens) - len(self.pages))

    def grow(self, tokens: int) -> None:
        """Hold pages for `tokens` tokens in all, and a slot."""
        if self.slot is None and self.pool.states is not None:
            self.slot = self.pool.states.take()
        count = self.missing(tokens)
        if count:
            self._own(self.pages + self.pool.take(count))

    def _own(self, pages: list[int]) -> None:
        self.pages = pages
        self.table = torch.tensor(pages, dtype=torch.int32, device=self.pool.device)

    def begin(self, count: int, prefill: bool) -> Staged | None:
        """The next pass has `count` rows of this sequence. Returns where it leaves recurrent state, if not recorded."""
        states = self.pool.states
        if states is not None:
            assert self.slot is not None, "grow comes first"
            self._passed, self._staged = True, states.stage(self.slot, count, prefill)
        return self._staged

    def commit(self, count: int) -> None:
        """Keep `count` of the rows just written, forget the rest."""
        assert count >= 0 and self.length + count <= len(self.pages) * self.pool.page
        if self.pool.states is not None:
            assert self._passed and self.slot is not None, "a commit follows a pass"
            self.pool.states.commit(self.slot, self._staged, count)
            self._passed, self._staged = False, None
        self.length += count

    def committed(self, count: int, by_device: int) -> None:
        """A device has kept `by_device` of the rows it wrote, without us; `count` of them are to stay."""
        states = self.pool.states
        if isinstance(states, DeviceStates):
            assert self.slot is not None
            states.committed(self.slot)
            if count != by_device:
                states.kept[self.slot].fill_(count)
        self.length += count

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on, long committed ones included: only where nothing is recurrent."""
        assert self.pool.states is None and length <= self.length, "recurrent state goes back to snapshots only"
        self.length = length

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
        self.length, self._passed, self._staged = snapshot.length, False, None

    def release(self) -> None:
        """Give all pages and the slot back."""
        self.pool.give_back(self.pages)
        self._own([])
        self._leave_slot()
        self.parked, self.length = None, 0

    def _leave_slot(self) -> None:
        if self.slot is not None and self.pool.states is not None:
            self.pool.states.give_back(self.slot)
        self.slot, self._passed, self._staged = None, False, None

    def park(self) -> None:
        """Move the contents to host memory and give pages and slot back."""
        host = torch.device("cpu")
        states, slot = self.pool.states, self.slot
        pages = torch.tensor(self.pages, dtype=torch.long, device=self.pool.device)
        self.parked = ParkedPages(
            [layer.keys[pages].cpu() for layer in self.pool.layers],
            [layer.values[pages].cpu() for layer in self.pool.layers],
            None if states is None or slot is None else states.copy(slot, host),
        )
        self.pool.give_back(self.pages)
        self._own([])
        self._leave_slot()

    @property
    def parked_pages(self) -> int:
        """Pages that `unpark` will need."""
        return 0 if self.parked is None else len(self.parked.keys[0])

    def unpark(self) -> None:
        """Bring the contents back into pages of the pool."""
        assert self.parked is not None and not self.pages
        self._own(self.pool.take(self.parked_pages))
        pages = self.table.long()
        for layer, keys, values in zip(self.pool.layers, self.parked.keys, self.parked.values, strict=True):
            layer.keys[pages] = keys.to(self.pool.device)
            layer.values[pages] = values.to(self.pool.device)
        if self.parked.state is not None and self.pool.states is not None:
            self.slot = self.pool.states.take()
            self.pool.states.put(self.slot, self.parked.state)
        self.parked = None
