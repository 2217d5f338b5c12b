"""The pool of key/value pages, and one sequence's share of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import HeadLayout, LayerPages, Span


class PagePool:
    """Pages of keys and values for all layers. Memory is reserved at once but touched only when handed out."""

    def __init__(
        self, layout: HeadLayout, layers: int, pages: int, page: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert page & (page - 1) == 0, "attention halves pages"
        self.page, self.count, self.device = page, pages, device
        keys = (pages, layout.kv_heads, layout.size, page)
        values = (pages, layout.kv_heads, page, layout.size)
        self.layers = [
            LayerPages(
                torch.empty(keys, dtype=dtype, device=device),
                torch.empty(values, dtype=dtype, device=device),
            )
            for _ in range(layers)
        ]
        self._free = list(reversed(range(pages)))  # the lowest number is handed out first

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
        for layer in self.layers:
            layer.keys[taken] = 0
            layer.values[taken] = 0
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))

    def check(self, owners: list[SequenceCache]) -> None:
        """Every page has exactly one owner or is free."""
        held = [page for owner in owners for page in owner.pages]
        assert sorted(held + self._free) == list(range(self.count)), "a page was lost or handed out twice"


@dataclass(slots=True)
class ParkedPages:
    """Copies of a sequence's pages in host memory, bits unchanged."""

    keys: list[Tensor]  # per layer [pages, kv heads, size, page]
    values: list[Tensor]


class SequenceCache:
    """Keys and values of one sequence. Rows written past `length` do not exist until `commit` keeps them."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.length = 0
        self.pages: list[int] = []
        self.table = torch.zeros(0, dtype=torch.int32, device=pool.device)
        self.parked: ParkedPages | None = None

    def missing(self, tokens: int) -> int:
        """Pages still to be taken before `tokens` fit."""
        return max(0, self.pool.pages_for(tokens) - len(self.pages))

    def grow(self, tokens: int) -> None:
        """Hold pages for `tokens` tokens in all."""
        count = self.missing(tokens)
        if count:
            self._own(self.pages + self.pool.take(count))

    def _own(self, pages: list[int]) -> None:
        self.pages = pages
        self.table = torch.tensor(pages, dtype=torch.int32, device=self.pool.device)

    def span(self, start: int, count: int) -> Span:
        """The next `count` rows of this sequence, at row `start` of a pass."""
        return Span(start, count, self.length, self.table)

    def commit(self, count: int) -> None:
        """Keep `count` of the rows just written, forget the rest."""
        assert count >= 0 and self.length + count <= len(self.pages) * self.pool.page
        self.length += count

    def release(self) -> None:
        """Give all pages back."""
        self.pool.give_back(self.pages)
        self._own([])
        self.parked, self.length = None, 0

    def park(self) -> None:
        """Move the contents to host memory and give the pages back."""
        pages = torch.tensor(self.pages, dtype=torch.long, device=self.pool.device)
        self.parked = ParkedPages(
            [layer.keys[pages].cpu() for layer in self.pool.layers],
            [layer.values[pages].cpu() for layer in self.pool.layers],
        )
        self.pool.give_back(self.pages)
        self._own([])

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
        self.parked = None
