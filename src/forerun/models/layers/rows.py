"""What goes into a target pass and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.pages import SequenceCache
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
    features: bool = False  # does a drafter want to see inside?

    @property
    def highest(self) -> int:
        """The largest position in the pass."""
        return max(span.position + span.count for span in self.spans) - 1


def make_pass(
    work: list[tuple[SequenceCache, list[int]]], *, last_only: bool, prefill: bool = False, features: bool = False
) -> Pass:
    """Tokens to feed to each sequence, as one pass. `last_only`: logits after the last token of each sequence."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    last: list[int] = []
    for cache, mine in work:
        spans.append(cache.span(len(tokens), len(mine)))
        tokens += mine
        positions += range(cache.length, cache.length + len(mine))
        last.append(len(tokens) - 1)
    pool = work[0][0].pool
    wanted = torch.tensor(last, device=pool.device) if last_only else None
    ids, places = torch.tensor(tokens, device=pool.device), torch.tensor(positions, device=pool.device)
    return Pass(ids, places, spans, pool.layers, wanted, prefill, features)


@dataclass(slots=True)
class Output:
    """Results of a pass."""

    logits: Tensor  # [wanted rows, vocabulary] float32
    hidden: Tensor  # [rows, hidden], after the final norm
    # [rows, (taps + 1) · hidden], when the pass asked: inputs of the tapped layers in order, then `hidden`
    features: Tensor | None = None
