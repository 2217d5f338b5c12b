"""The sequences of a device round, one per lane, in buffers that captured graphs read and write."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.mtp import Waiting
from forerun.engine.sequence import Sequence
from forerun.kernels.interface import WIDEST
from forerun.sample.noise import split_seed
from forerun.sample.reference import min_p_offset


@dataclass(slots=True)
class Seat:
    """What the host puts into a lane."""

    sequence: Sequence
    pages: list[int]  # it holds, as far as the lane knows
    slot: int | None
    head_pages: list[int] | None  # of a sequence whose drafts come from the head
    waiting: Waiting | None = None  # what the head has yet to read of it


class Packed:
    """Buffers side by side in memory: one copy moves all of them from the host to a device."""

    def __init__(self, device: torch.device, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        sizes = {name: kind.itemsize * prod(shape) for name, (kind, shape) in fields.items()}
        room = [size + -size % 16 for size in sizes.values()]
        self._there = torch.zeros(sum(room), dtype=torch.uint8, device=device)
        self._here = torch.zeros(sum(room), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.there: dict[str, Tensor] = {}
        self.here: dict[str, Any] = {}  # numpy arrays
        starts = [sum(room[:index]) for index in range(len(room))]
        for start, (name, (kind, shape)) in zip(starts, fields.items(), strict=True):
            part = slice(start, start + sizes[name])
            self.there[name] = self._there[part].view(kind).view(shape)
            self.here[name] = self._here[part].view(kind).view(shape).numpy()

    def send(self) -> None:
        """All that was written here. Write again when the device has run what was launched after this."""
        self._there.copy_(self._here, non_blocking=True)


class Lanes:
    """Between rounds the device alone knows how far each lane has come; the host follows a step behind."""

    def __init__(self, most: int, pages: int, pool: PagePool, head_pool: PagePool | None) -> None:
        """`pages`: the most a sequence may hold."""
        device = pool.device
        self.pool, self.head_pool, self.device = pool, head_pool, device
        whole, real, small = torch.int64, torch.float64, torch.int32
        self._drafts = Packed(device, {"tokens": (whole, (WIDEST - 1, most)), "counts": (small, (most,))})
        self.drafts = self._drafts.there["tokens"]  # by depth
        self.drafted = self._drafts.there["counts"]  # real ones among them
        self._state = Packed(
            device,
            {
                "pending": (whole, (most,)),
                "seed": (whole, (most, 3)),
                **dict.fromkeys(("temperature", "top_p", "min_p_offset"), (real, (most,))),
                **dict.fromkeys(("live", "headed", "position", "slot", "top_k"), (small, (most,))),
            },
        )
        state = self._state.there
        self.pending, self.seed = state["pending"], state["seed"]
        self.temperature, self.top_k, self.top_p = state["temperature"], state["top_k"], state["top_p"]
        self.min_p_offset = state["min_p_offset"]
        self.live = state["live"]
        self.headed = state["headed"]  # lanes whose drafts come from the head
        self.position, self.slot = state["position"], state["slot"]  # tokens in the cache; in the recurrent state
        self.tables = [torch.zeros(most, pages, dtype=small, device=device) for _ in pool.groups]
        self.head_table = torch.zeros(most, pages, dtype=small, device=device)
        self.clear()

    def clear(self) -> None:
        """All lanes idle: they write where nothing is kept."""
        self.seat([])

    def seat(self, seats: list[Seat]) -> None:
        """Put sequences into the first lanes, as the host knows them; they have no drafts yet. The others are idle."""
        state = self._state.here
        for values in state.values():
            values.fill(0)
        state["slot"].fill(self.pool.spare_slot)
        state["top_p"].fill(1)
        for lane, seat in enumerate(seats):
            sequence = seat.sequence
            params = sequence.request.sampling
            state["pending"][lane], state["position"][lane] = sequence.pending, sequence.cache.length
            state["live"][lane], state["headed"][lane] = 1, seat.head_pages is not None
            if seat.slot is not None:
                state["slot"][lane] = seat.slot
            # The best token alone survives a top-k of 1: no noise is needed to find it, nor to draft it.
            state["temperature"][lane] = 0.0 if params.top_k == 1 else params.temperature
            state["top_k"][lane] = 0 if params.greedy else params.top_k
            state["top_p"][lane], state["min_p_offset"][lane] = params.top_p, min_p_offset(params)
            state["seed"][lane] = [*split_seed(params.seed), params.choice]
        self._state.send()
        for values in self._drafts.here.values():
            values.fill(0)
        self._drafts.send()
        for table in self.tables:
            table.fill_(self.pool.spare_page)
        self.head_table.fill_(0 if self.head_pool is None else self.head_pool.spare_page)
        if seats:
            self.turn_pages(seats)

    def turn_pages(self, seats: list[Seat]) -> None:
        """Where the lanes' keys and values are. Pages may be added between rounds, drafts stay."""
        for group, table in enumerate(self.tables):
            self._pages(table, [seat.sequence.cache.blocks[group] for seat in seats], self.pool)
        if self.head_pool is not None:
            self._pages(self.head_table, [seat.head_pages or [] for seat in seats], self.head_pool)

    def give(self, drafts: list[list[int] | None]) -> None:
        """Drafts that the host made for the first lanes; None: a lane keeps those it has."""
        tokens, counts = self._drafts.here["tokens"], self._drafts.here["counts"]
        for lane, mine in enumerate(drafts):
            if mine is not None:
                tokens[: len(mine), lane] = mine
                counts[lane] = len(mine)
        if None not in drafts:
            self._drafts.send()  # idle lanes may get anything
            return
        lanes = [lane for lane, mine in enumerate(drafts) if mine is not None]
        given = torch.from_numpy(tokens[:, lanes]), torch.from_numpy(counts[lanes])
        there = torch.tensor(lanes).to(self.device, non_blocking=True)
        self.drafts[:, there] = given[0].to(self.device, non_blocking=True)
        self.drafted[there] = given[1].to(self.device, non_blocking=True)

    def _pages(self, table: Tensor, held: list[list[int]], pool: PagePool) -> None:
        most, spare = max(map(len, held)), pool.spare_page
        rows = [pages + [spare] * (most - len(pages)) for pages in held]
        table[: len(held), :most] = torch.tensor(rows, dtype=torch.int32).to(self.device, non_blocking=True)
