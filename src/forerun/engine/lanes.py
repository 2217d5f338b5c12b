"""The sequences of a device round, one per lane, in buffers that captured graphs read and write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
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


class Lanes:
    """Between rounds the device alone knows how far each lane has come; the host follows a step behind."""

    def __init__(self, most: int, pages: int, pool: PagePool, head_pool: PagePool | None) -> None:
        """`pages`: the most a sequence may hold."""
        device = pool.device
        self.pool, self.head_pool, self.device = pool, head_pool, device

        def integers(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.pending = integers(most, kind=torch.int64)
        self.drafts = integers(WIDEST - 1, most, kind=torch.int64)  # by depth
        self.drafted = integers(most)  # real ones among them
        self._given = integers(WIDEST, most, kind=torch.int64)  # drafts of the host, and last how many, −1 for none
        self.live = integers(most)
        self.headed = integers(most)  # lanes whose drafts come from the head
        self.position = integers(most)  # tokens in the cache
        self.slot = integers(most)
        self.table = integers(most, pages)
        self.head_table = integers(most, pages)
        self.temperature = torch.zeros(most, dtype=torch.float64, device=device)
        self.seed = integers(most, 3, kind=torch.int64)
        self.top_k = integers(most)
        self.top_p = torch.ones(most, dtype=torch.float64, device=device)
        self.min_p_offset = torch.zeros(most, dtype=torch.float64, device=device)
        self.clear()

    def clear(self) -> None:
        """All lanes idle: they write where nothing is kept."""
        for buffer in (self.pending, self.drafts, self.drafted, self.live, self.headed, self.position):
            buffer.zero_()
        self.slot.fill_(self.pool.spare_slot)
        self.table.fill_(self.pool.spare_page)
        self.head_table.fill_(0 if self.head_pool is None else self.head_pool.spare_page)
        self.temperature.zero_()

    def seat(self, seats: list[Seat]) -> None:
        """Put sequences into the first lanes, as the host knows them; they have no drafts yet."""
        self.clear()
        count = len(seats)
        sequences = [seat.sequence for seat in seats]
        sampling = [sequence.request.sampling for sequence in sequences]

        def put(buffer: Tensor, values: object) -> None:
            buffer[:count] = torch.tensor(values, dtype=buffer.dtype).to(self.device, non_blocking=True)

        put(self.pending, [sequence.pending for sequence in sequences])
        put(self.position, [sequence.cache.length for sequence in sequences])
        put(self.live, [1] * count)
        put(self.headed, [int(seat.head_pages is not None) for seat in seats])
        put(self.slot, [self.pool.spare_slot if s.cache.slot is None else s.cache.slot for s in sequences])
        # The best token alone survives a top-k of 1: no noise is needed to find it, nor to draft it.
        put(self.temperature, [0.0 if params.top_k == 1 else params.temperature for params in sampling])
        put(self.top_k, [0 if params.greedy else params.top_k for params in sampling])
        put(self.top_p, [params.top_p for params in sampling])
        put(self.min_p_offset, [min_p_offset(params) for params in sampling])
        put(self.seed, [[*split_seed(params.seed), params.choice] for params in sampling])
        self.turn_pages(seats)

    def turn_pages(self, seats: list[Seat]) -> None:
        """Where the lanes' keys and values are. Pages may be added between rounds, drafts stay."""
        self._pages(self.table, [seat.sequence.cache.pages for seat in seats], self.pool)
        if self.head_pool is not None:
            self._pages(self.head_table, [seat.head_pages or [] for seat in seats], self.head_pool)

    def give(self, drafts: list[list[int] | None]) -> None:
        """Drafts that the host made for the first lanes; None: a lane keeps those it has."""
        lines = [[-1] * WIDEST if d is None else d + [0] * (WIDEST - 1 - len(d)) + [len(d)] for d in drafts]
        given = self._given[:, : len(drafts)]
        given.copy_(torch.tensor(lines).T, non_blocking=True)
        here, counts = given[-1] >= 0, given[-1].to(torch.int32)
        mine, drafted = self.drafts[:, : len(drafts)], self.drafted[: len(drafts)]
        mine.copy_(torch.where(here, given[:-1], mine))
        drafted.copy_(torch.where(here, counts, drafted))

    def _pages(self, table: Tensor, held: list[list[int]], pool: PagePool) -> None:
        most, spare = max(map(len, held)), pool.spare_page
        rows = [pages + [spare] * (most - len(pages)) for pages in held]
        table[: len(held), :most] = torch.tensor(rows, dtype=torch.int32).to(self.device, non_blocking=True)
