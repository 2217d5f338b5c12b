"""What goes into a target pass and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from forerun.cache.pages import SequenceCache
from forerun.kernels.interface import Chunk, LayerPages, PassRows
from forerun.models.layers.media import MediaRows, PromptMedia, media_of_pass

Work = list[tuple[SequenceCache, list[int]]]  # tokens to feed to each sequence


@dataclass(slots=True)
class Pass:
    """All rows of one pass: those of decode rounds and of prompts, of many sequences. Bodies whose prompt rows are of
    another kind take a stretch of one prompt alone (`prefill`).
    """

    tokens: Tensor  # [rows] int64
    rows: PassRows
    pages: list[LayerPages]  # one per layer
    wanted: Tensor | None  # rows whose logits are needed, [n] int64; None = all
    prefill: bool
    features: bool = False  # does a drafter want to see inside?
    media: MediaRows | None = None  # what takes the place of some tokens of prompts

    def start(self, index: int) -> int:
        """The first row of sequence number `index`."""
        return int(self.rows.query_start[index])

    def lay_out(self, parts: list[Tensor]) -> Tensor:
        """What goes with the tokens of each sequence, each [tokens, size], as rows of the pass: padded where it is."""
        room = self.rows.query_start.diff().tolist()
        return torch.cat([pad(part, (0, 0, 0, rows - len(part))) for part, rows in zip(parts, room, strict=True)])


def make_pass(
    work: Work,
    *,
    last_only: bool = False,
    wanted: Sequence[int] | None = None,
    prefill: bool = False,
    features: bool = False,
    media: Sequence[PromptMedia | None] = (),
) -> Pass:
    """Tokens to feed to each sequence, as one pass. Logits are wanted of all rows, or after the last token of each
    sequence (`last_only`), or of its last `wanted` rows. `media`: of each sequence, where any has some.
    """
    pool = work[0][0].pool
    assert len(work) == 1 or not prefill
    staged = [cache.begin(len(mine), prefill) for cache, mine in work]
    rows, tokens, last = (_uniform_rows if pool.on_device else _ragged_rows)(work)
    rows.states = () if pool.states is None else pool.states.layers
    rows.staged = staged if any(staged) else ()
    if prefill:
        rows.chunk = Chunk(work[0][0].length, work[0][0].slot or 0)
    seen = None
    if media:
        spans = [(cache.length, cache.length + len(mine)) for cache, mine in work]
        seen = media_of_pass([(own, *span) for own, span in zip(media, spans, strict=True)], pool.device)
    if seen is not None:
        assert not pool.on_device or len(work) == 1, "rows of media are not padded"
        rows.together = seen.together
    chosen = last if last_only else None
    if wanted is not None:
        ends = (last + 1).tolist()
        numbers = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
        chosen = torch.tensor(numbers, dtype=torch.int64, device=pool.device)
    return Pass(tokens, rows, pool.layers, chosen, prefill, features, seen)


def _ragged_rows(work: Work) -> tuple[PassRows, Tensor, Tensor]:
    """Rows, their tokens and the last row of each sequence; every sequence has as many rows as tokens."""
    device = work[0][0].pool.device
    counts = [len(mine) for _, mine in work]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    numbers = [(cache.length, cache.slot or 0) for cache, _ in work]
    position, slot = torch.tensor(numbers, dtype=torch.int32, device=device).T.contiguous()
    tables = ragged_tables([cache for cache, _ in work])
    longest = max(cache.length + len(mine) for cache, mine in work)
    tokens = torch.tensor([token for _, mine in work for token in mine], device=device)
    last = (starts[1:] - 1).long().to(device)
    return PassRows(starts, max(counts), position, tables, slot, longest=longest), tokens, last


def ragged_tables(caches: list[SequenceCache]) -> list[Tensor]:
    """By page group the block tables of all sequences [sequences, pages]."""
    return [
        each[0][None] if len(each) == 1 else pad_sequence(list(each), batch_first=True)
        for each in zip(*(cache.tables for cache in caches), strict=True)
    ]


def last_rows(caches: list[SequenceCache], ahead: int = 0) -> PassRows:
    """One row at the last committed position of each sequence, for who reads its pages and writes nothing.

    Tables of angles must reach `ahead` positions further.
    """
    pool, last = caches[0].pool, [cache.length - 1 for cache in caches]
    if pool.on_device:
        pages = max(pool.pages_for(cache.length) for cache in caches)
        groups = range(len(pool.groups))
        tables = [[page for cache in caches for page in _padded(cache, group, pages)] for group in groups]
        position, *entries = upload([last, *tables], pool.device)
        block_tables = [table.view(len(caches), pages) for table in entries]
    else:
        position, block_tables = torch.tensor(last, dtype=torch.int32), ragged_tables(caches)
    rows = PassRows.uniform(1, position, block_tables, torch.zeros_like(position))
    rows.longest = max(last) + 1 + ahead
    return rows


def _padded(cache: SequenceCache, group: int, pages: int) -> list[int]:
    """A sequence's block table of so many entries."""
    return (cache.blocks[group] + [cache.pool.spare_page] * pages)[:pages]


def _uniform_rows(work: Work) -> tuple[PassRows, Tensor, Tensor]:
    """As a device has them: shorter sequences get rows that nobody looks at, written where nothing is kept."""
    pool = work[0][0].pool
    width = max(len(mine) for _, mine in work)
    pages = max(pool.pages_for(cache.length + width) for cache, _ in work)
    ids = [token for _, mine in work for token in mine + [0] * (width - len(mine))]
    groups = range(len(pool.groups))
    tables = [[page for cache, _ in work for page in _padded(cache, group, pages)] for group in groups]
    places = [cache.length for cache, _ in work]
    slots = [pool.spare_slot if cache.slot is None else cache.slot for cache, _ in work]
    last = [index * width + len(mine) - 1 for index, (_, mine) in enumerate(work)]
    position, slot, tokens, ends, *entries = upload([places, slots, ids, last, *tables], pool.device)
    rows = PassRows.uniform(width, position, [table.view(len(work), pages) for table in entries], slot)
    return rows, tokens.long(), ends.long()


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
    # [rows, (taps + 1) · hidden], when the pass asked: inputs of the tapped layers in order, then what the output
    # matrix reads: hidden states after the final norm
    features: Tensor | None = None


class Target(Protocol):
    """Whatever runs passes of a model."""

    def forward(self, batch: Pass) -> Output:
        """Run all rows; keys and values of every row are written to its sequence's pages."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """Of rows that were run, by their features: float32 [rows, vocabulary]."""
        ...
