"""What a pass has to know of its rows, as arrays at fixed places: a program that was made once runs for any rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from forerun.kernels.cpu.attention import ITEMS
from forerun.kernels.interface import Angles, PassRows

TILE_ROWS = 16  # rows of one sequence that share the loads of keys and values


class RowPlan:
    """Owner and position of every row, tiles of rows for attention, and where block tables and angles are."""

    def __init__(self, rows: int, groups: int, angles: int) -> None:
        self.capacity = rows
        self.count = np.zeros(1, np.int32)
        self.tile_count = np.zeros(1, np.int32)
        self.wanted_count = np.zeros(1, np.int32)
        self.owner, self.position, self.stop, self.first = (np.zeros(rows, np.int32) for _ in range(4))
        self.order = np.arange(rows, dtype=np.int32)
        self.wanted = np.zeros(rows, np.int64)
        self.tiles = np.zeros((rows, 2), np.int32)  # first row, rows
        self.tables = np.zeros((groups, 2), np.int64)  # address, entries of a sequence
        # Addresses of cosines, of sines, and of the entry of both that each row turns by.
        self.turns = np.zeros((angles, 3), np.int64)
        self.shared = 1  # query heads of a key head, at most
        self._kept: list[Any] = []  # what the addresses point to

    def fill(self, rows: PassRows, angles: Sequence[Angles], wanted: Tensor | None) -> None:
        """Take over the rows of a pass."""
        starts, positions = rows.query_start.tolist(), rows.position.tolist()
        self.count[0] = count = starts[-1]
        height = max(1, min(TILE_ROWS, ITEMS // self.shared))
        tiles = 0
        for sequence, position in enumerate(positions):
            first, last = starts[sequence], starts[sequence + 1]
            self.owner[first:last] = sequence
            if last - first == 1:
                self.position[first] = position
                self.tiles[tiles] = first, 1
                tiles += 1
                continue
            self.position[first:last] = np.arange(position, position + last - first)
            for row in range(first, last, height):
                self.tiles[tiles] = row, min(height, last - row)
                tiles += 1
        self.tile_count[0] = tiles
        np.add(self.position[:count], 1, out=self.stop[:count])
        if rows.together is not None:
            self._see_each_other(rows.together.numpy())
        self.first[: len(positions)] = 0 if rows.first is None else rows.first.numpy()
        self._kept = [*rows.block_tables, *angles]
        for group, table in enumerate(rows.block_tables):
            self.tables[group] = table.data_ptr(), table.stride(0)
        for index, each in enumerate(angles):
            turn = self.order if each.by_row else self.position
            self.turns[index] = each.cos.data_ptr(), each.sin.data_ptr(), turn.ctypes.data
        if wanted is None:
            self.wanted_count[0] = count
            self.wanted[:count] = np.arange(count)
        else:
            self.wanted_count[0] = len(wanted)
            self.wanted[: len(wanted)] = wanted.numpy()

    def fill_plain(self, count: int) -> None:
        """So many rows that have no place in a sequence."""
        self.count[0] = self.wanted_count[0] = count

    def _see_each_other(self, together: np.ndarray) -> None:
        """Rows of one picture end with its last row, in layers with a window."""
        count = len(together)
        ends = np.flatnonzero(np.diff(together, append=-2))  # the last row of each run
        end_of = ends[np.searchsorted(ends, np.arange(count))]
        inside = together >= 0
        self.stop[:count][inside] = self.position[:count][end_of[inside]] + 1
