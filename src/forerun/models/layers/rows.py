"""What goes into a target pass and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import LayerPages, Span


@dataclass(slots=True)
class Pass:
    """All rows of one pass: a decode round of many sequences, or one prefill chunk of one sequence."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    spans: list[Span]
    pages: list[LayerPages]  # one per layer
    wanted: Tensor | None  # rows whose logits are needed, [n] int64; None = all
    prefill: bool

    @property
    def highest(self) -> int:
        """The largest position in the pass."""
        return max(span.position + span.count for span in self.spans) - 1


@dataclass(slots=True)
class Output:
    """Results of a pass."""

    logits: Tensor  # [wanted rows, vocabulary] float32
    hidden: Tensor  # [rows, hidden], after the final norm
