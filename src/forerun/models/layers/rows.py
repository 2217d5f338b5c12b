"""What goes into a target pass and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache.pages import SequenceCache
from forerun.kernels.interface import Grid, LayerPages, Rows, Span


@dataclass(slots=True)
class Pass:
    """All rows of one pass: a decode round of many sequences, or one prefill chunk of one sequence."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64; of a `Grid` nobody asks
    spans: Rows
    pages: list[LayerPages]  # one per layer
    wanted: Tensor | None  # rows whose logits are needed, [n] int64; None = all
    prefill: bool
    features: bool = False  # does a drafter want to see inside?

    @property
    def highest(self) -> int:
        """The largest position in the pass."""
        assert isinstance(self.spans, list)
        return max(span.position + span.count for span in self.spans) - 1

    def start(self, index: int) -> int:
        """The first row of sequence number `index`."""
        return index * self.spans.width if isinstance(self.spans, Grid) else self.spans[index].start


def make_pass(
    work: list[tuple[SequenceCache, list[int]]], *, last_only: bool, prefill: bool = False, features: bool = False
) -> Pass:
    """Tokens to feed to each sequence, as one pass. `last_only`: logits after the last token of each sequence."""
    pool = work[0][0].pool
    if pool.on_device:
        return _device_pass(work, last_only, prefill, features)
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    last: list[int] = []
    for cache, mine in work:
        spans.append(cache.span(len(tokens), len(mine)))
        tokens += mine
        positions += range(cache.length, cache.length + len(mine))
        last.append(len(tokens) - 1)
    wanted = torch.tensor(last, device=pool.device) if last_only else None
    ids, places = torch.tensor(tokens, device=pool.device), torch.tensor(positions, device=pool.device)
    return Pass(ids, places, spans, pool.layers, wanted, prefill, features)


def _device_pass(work: list[tuple[SequenceCache, list[int]]], last_only: bool, prefill: bool, features: bool) -> Pass:
    """As a `Grid`: shorter sequences get rows that nobody looks at, written where nothing is kept."""
    pool = work[0][0].pool
    width = max(len(mine) for _, mine in work)
    pages = max(pool.pages_for(cache.length + width) for cache, _ in work)
    ids: list[int] = []
    spans, slots, last = [], [], []
    table: list[int] = []
    for index, (cache, mine) in enumerate(work):
        spans.append(cache.span(index * width, len(mine), prefill))
        ids += mine + [0] * (width - len(mine))
        held = cache.pages[:pages]
        table += held + [pool.spare_page] * (pages - len(held))
        slots.append(pool.spare_slot if cache.slot is None else cache.slot)
        last.append(index * width + len(mine) - 1)
    places = [cache.length for cache, _ in work]
    position, entries, slot, tokens, wanted = upload([places, table, slots, ids, last], pool.device)
    states = () if pool.states is None else pool.states.layers
    grid = Grid(width, position, entries.view(len(work), pages), slot, states, spans[0] if prefill else None)
    rows = tokens.long()
    return Pass(rows, rows, grid, pool.layers, wanted.long() if last_only else None, prefill, features)


def upload(parts: list[list[int]], device: torch.device) -> list[Tensor]:
    """Lists of numbers as int32, in one copy: each costs as much as a kernel. Parts start at multiples of 16 bytes."""
    room = [len(part) + -len(part) % 4 for part in parts]
    padded = [part + [0] * (size - len(part)) for part, size in zip(parts, room, strict=True)]
    everything = torch.tensor(list(chain.from_iterable(padded)), dtype=torch.int32).to(device)
    return [whole[: len(part)] for whole, part in zip(everything.split(room), parts, strict=True)]


@dataclass(slots=True)
class Output:
    """Results of a pass."""

    logits: Tensor  # [wanted rows, vocabulary] float32
    hidden: Tensor  # [rows, hidden], after the final norm
    # [rows, (taps + 1) · hidden], when the pass asked: inputs of the tapped layers in order, then `hidden`
    features: Tensor | None = None


class Target(Protocol):
    """Whatever runs passes of a model."""

    def forward(self, batch: Pass) -> Output:
        """Run all rows; keys and values of every row are written to its sequence's pages."""
        ...
