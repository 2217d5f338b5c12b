"""What a model may ask of the machine: the operations, and the rows they work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forerun.kernels.matrix import Matrix


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Columns of a fused projection: queries, then keys, then values."""

    heads: int
    kv_heads: int
    size: int

    @property
    def key_column(self) -> int:
        return self.heads * self.size

    @property
    def value_column(self) -> int:
        return (self.heads + self.kv_heads) * self.size

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.size


@dataclass(slots=True)
class Span:
    """The rows of one sequence in a pass."""

    start: int  # its first row in the pass
    count: int
    position: int  # of its first row in the sequence
    pages: Tensor  # [pages of the sequence] int32


@dataclass(slots=True)
class LayerPages:
    """One layer's keys and values in the page pool."""

    keys: Tensor  # [pages, kv heads, head size, page size]
    values: Tensor  # [pages, kv heads, page size, head size]


class Kernels(Protocol):
    """Bodies of all operations for one device and precision, picked once when a model loads.

    With `prefill` the pass holds one chunk of one sequence, whose borders depend on the request alone; any
    deterministic routine will do. Without it, a row's bits must not depend on the other rows of the pass.
    """

    name: str

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """Pack weight [out, in] the way `linear` wants it."""
        ...

    def linear(self, x: Tensor, matrix: Matrix, prefill: bool) -> Tensor:
        """[rows, in] → [rows, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, width] → [rows, width], computed in float32."""
        ...

    def head_norm(self, x: Tensor, first: int, heads: int, weight: Tensor, eps: float) -> None:
        """RMS norm in place of `heads` heads starting at column `first`."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2·width] → silu(first half) · second half."""
        ...

    def rotate(self, x: Tensor, first: int, heads: int, size: int, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place; cos and sin [rows, rotated/2]."""
        ...

    def store(self, qkv: Tensor, layout: HeadLayout, spans: list[Span], layer: LayerPages) -> None:
        """Write the keys and values of all rows into the pages of their sequences."""
        ...

    def attention(
        self, qkv: Tensor, layout: HeadLayout, spans: list[Span], layer: LayerPages, window: int, prefill: bool
    ) -> Tensor:
        """[rows, layout.width] → [rows, heads · size]; window 0 means all keys before the row."""
        ...
