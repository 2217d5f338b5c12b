"""Pages of the layers that keep keys and values of one shape, in one window. Pages are counted, not owned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from forerun.kernels.interface import WIDEST, AttentionSpec, LayerPages

HOLE = -1  # in a block table: a page that was given back, because no row to come sees it


def _zeroable(pages: torch.Tensor) -> torch.Tensor | np.ndarray:
    """What is set to zero to clear pages: on a CPU by numpy, which takes a seventh of torch's time for it."""
    return pages.view(torch.uint8).numpy() if pages.device.type == "cpu" else pages


class PageGroup:
    """Several may hold a page; it is free when nobody does. Memory is touched only when a page is handed out."""

    def __init__(
        self,
        number: int,
        spec: AttentionSpec,
        layers: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: bool,
    ) -> None:
        """`number`: among the groups of a pool; `spare`: one more page, for rows that nobody keeps."""
        self.page, self.count, self.window = page, pages, spec.window
        heads, size = spec.layout.kv_heads, spec.layout.size
        self._keys = torch.empty(layers, pages + spare, heads, size, page, dtype=dtype, device=device)
        self._values = torch.empty(layers, pages + spare, heads, page, size, dtype=dtype, device=device)
        if spare:
            self._keys[:, pages], self._values[:, pages] = 0, 0
        self.layers = [LayerPages(*both, number) for both in zip(self._keys, self._values, strict=True)]
        self._zeroed = () if spare else tuple(map(_zeroable, (self._keys, self._values)))
        self._holders = [0] * pages
        self._free = list(reversed(range(pages)))  # the lowest number is handed out first

    @property
    def device(self) -> torch.device:
        """Where its pages are."""
        return self._keys.device

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Of the keys and of the values of a page."""
        return self._keys[:, 0].nbytes, self._values[:, 0].nbytes

    @property
    def layout(self) -> str:
        """What the bytes of a page mean."""
        return f"{self._keys.dtype} {list(self._keys[:, 0].shape)} {list(self._values[:, 0].shape)} {self.window}"

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out zeroed pages: what an old owner left (NaN above all) must not reach a new one."""
        assert count <= self.free, "the scheduler hands out pages only when they are free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        for part in self._zeroed if taken else ():  # the kernels of a device mask what is not there
            part[:, taken] = 0
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holds these pages."""
        for page in pages:
            assert self._holders[page] > 0, "this page has no holder: its contents may be gone"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One fewer holds these pages; holes among them are skipped."""
        free = []
        for page in pages:
            if page != HOLE:
                self._holders[page] -= 1
                if self._holders[page] == 0:
                    free.append(page)
        self._free.extend(reversed(free))

    def recount(self, held: Iterable[int]) -> None:
        """These are held, once for each time they are named; all others are free."""
        found = Counter(page for page in held if page != HOLE)
        self._holders = [found[page] for page in range(len(self._holders))]
        self._free = [page for page in reversed(range(len(self._holders))) if not found[page]]

    def first_needed(self, length: int) -> int:
        """The first block that a row at position `length` or later sees."""
        return max(0, length + 1 - self.window) // self.page if self.window else 0

    def first_kept(self, length: int) -> int:
        """The first block that is kept when `length` tokens are committed: a whole round may still be rolled back."""
        return self.first_needed(length - WIDEST) if length > WIDEST else 0

    def copy(self, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some pages in host memory, each [layers, pages, …]."""
        return self._keys[:, pages].cpu(), self._values[:, pages].cpu()

    def copy_one(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one page in host memory, each [layers, …]; where the pool is there too, they are views."""
        return self._keys[:, page].cpu(), self._values[:, page].cpu()

    def put(self, pages: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring copies back."""
        self._keys[:, pages], self._values[:, pages] = keys.to(self._keys.device), values.to(self._values.device)

    def check(self, held: Iterable[int]) -> None:
        """Every page is held as often as it is counted, and free exactly when nobody holds it."""
        found = Counter(page for page in held if page != HOLE)
        assert [found[page] for page in range(len(self._holders))] == self._holders, (
            "a page was lost or handed out twice"
        )
        free = [page for page, holders in enumerate(self._holders) if holders == 0]
        assert sorted(self._free) == free, "a page was lost or handed out twice"
