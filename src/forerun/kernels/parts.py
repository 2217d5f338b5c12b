"""Weights as they are stored: views of mapped files with a format, taken apart only where they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.kernels.formats import Bytes, Codes, Floats, Format

PIECE_VALUES = 2**20  # values decoded at a time: their codes stay in a core's cache


def _unchecked() -> None:
    """What lies in memory stays."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a stored matrix, or a stack of such matrices. Row i is the stored row row_map[i]."""

    format: Format
    raw: Bytes  # [..., stored rows, bytes of a row]: a view of the file
    shape: tuple[int, ...]  # (rows, columns), or (matrices, rows, columns)
    row_map: NDArray[np.int64] | None = None  # [rows]; None leaves rows as they are stored
    scales: WeightPart | None = None  # affine formats: [..., stored rows, blocks of a row]
    biases: WeightPart | None = None
    # Raises when the file is not what it was: reading a map beyond the end of its file ends the process.
    check: Callable[[], None] = _unchecked

    @property
    def nbytes(self) -> int:
        """What a product with all rows reads."""
        own = self.format.row_bytes(self.shape[-1]) * int(np.prod(self.shape[:-1]))
        return own + sum(each.nbytes for each in (self.scales, self.biases) if each is not None)

    def __getitem__(self, index: int | slice | NDArray[Any]) -> WeightPart:
        """Some rows, in the order asked for; of a stack one matrix, or some of them. Nothing is copied."""
        scales, biases = (None if part is None else part[index] for part in (self.scales, self.biases))
        if len(self.shape) == 3:
            raw = self.raw[index]
            return replace(self, raw=raw, shape=(*raw.shape[:-2], *self.shape[1:]), scales=scales, biases=biases)
        assert not isinstance(index, int | np.integer), "one row is a slice of rows"
        if self.row_map is None and isinstance(index, slice):
            raw = self.raw[index]
            return replace(self, raw=raw, shape=(len(raw), self.shape[1]), scales=scales, biases=biases)
        row_map = np.arange(self.shape[0])[index] if self.row_map is None else self.row_map[index]
        return replace(self, shape=(len(row_map), self.shape[1]), row_map=row_map, scales=scales, biases=biases)

    def rows(self, start: int = 0, stop: int | None = None) -> Floats:
        """Rows start to stop of a matrix, decoded [rows, columns]; of a stack the same rows of every matrix."""
        if len(self.shape) == 3:
            return np.stack([self[number].rows(start, stop) for number in range(self.shape[0])])
        self.check()
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        values = np.empty((max(stop - start, 0), self.shape[1]), np.float32)
        step = max(1, PIECE_VALUES // self.shape[1])
        for first in range(start, stop, step):
            last = min(first + step, stop)
            piece = self.format.unpack(*self._blocks(first, last))
            values[first - start : last - start] = piece.reshape(last - first, -1)
        return values

    def split(self, start: int = 0, stop: int | None = None) -> Codes:
        """The blocks of rows start to stop of a matrix taken apart, row by row: [rows · blocks of a row, …]."""
        self.check()
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        return self.format.split(*self._blocks(start, stop))

    def stored(self, start: int, stop: int) -> Bytes:
        """The bytes of rows start to stop of a matrix [rows, bytes of a row]: a view where there is no row map."""
        assert len(self.shape) == 2, "one matrix of a stack at a time"
        return self.raw[start:stop] if self.row_map is None else self.raw[self.row_map[start:stop]]

    def _blocks(self, start: int, stop: int) -> tuple[Bytes, Floats | None, Floats | None]:
        raw = self.stored(start, stop).reshape(-1, self.format.bytes)
        if self.scales is None or self.biases is None:
            return raw, None, None
        return raw, self.scales.rows(start, stop).reshape(-1), self.biases.rows(start, stop).reshape(-1)
