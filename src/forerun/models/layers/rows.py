"""What goes into a target pass and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.cache.groups import HOLE
from forerun.cache.pages import SequenceCache
from forerun.kernels.interface import WIDEST, LayerPages, PassRows, RowTables
from forerun.models.layers.media import MediaRows, PromptMedia, media_of_pass

Work = list[tuple[SequenceCache, list[int]]]  # tokens to feed to each sequence


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a pass."""

    cache: SequenceCache
    start: int  # position of the first
    count: int
    prompt: bool = False  # are they a stretch of a prompt, which a recurrence takes in chunks?


@dataclass(slots=True)
class Pass:
    """All rows of one pass: those that are being generated and those of prompts, of many sequences."""

    tokens: Tensor  # [rows] int64
    rows: PassRows
    pages: list[LayerPages]  # one per layer
    wanted: Tensor | None  # rows whose logits are needed, [n] int64; None = all
    features: bool = False  # does a drafter want to see inside?
    media: MediaRows | None = None  # what takes the place of some tokens of prompts

    def start(self, index: int) -> int:
        """The first row of sequence number `index`."""
        return int(self.rows.query_start[index])


def make_pass(
    work: Work,
    *,
    last_only: bool = False,
    wanted: Sequence[int] | None = None,
    prompt: bool = False,
    features: bool = False,
    media: Sequence[PromptMedia | None] = (),
) -> Pass:
    """Tokens to feed to each sequence, as one pass. Logits are wanted of all rows, or after the last token of each
    sequence (`last_only`), or of its last `wanted` rows. `media`: of each sequence, where any has some. `prompt`: they
    are stretches of prompts.
    """
    pool = work[0][0].pool
    parts = [Part(cache, cache.length, len(mine), prompt or len(mine) > WIDEST) for cache, mine in work]
    staged = [part.cache.begin(part.count, part.prompt) for part in parts]
    rows = rows_of(parts)
    rows.states = () if pool.states is None else pool.states.layers
    rows.staged = staged if any(staged) else ()
    seen = None
    if media:
        spans = [(part.start, part.start + part.count) for part in parts]
        seen = media_of_pass([(own, *span) for own, span in zip(media, spans, strict=True)], pool.device)
    if seen is not None:
        rows.together = seen.together
        if rows.tables is not None and seen.together is not None:
            rows.tables.pictures = pictures_of(seen.together, rows.tables.at)
    chosen = None
    if last_only or wanted is not None:
        counts = [1] * len(work) if wanted is None else wanted
        ends = rows.query_start[1:].tolist()
        numbers = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        chosen = torch.tensor(numbers, dtype=torch.int64, device=pool.device)
    tokens = torch.tensor([token for _, mine in work for token in mine], device=pool.device)
    return Pass(tokens, rows, pool.layers, chosen, features, seen)


def rows_of(parts: Sequence[Part]) -> PassRows:
    """Where the rows of a pass belong; every sequence has as many as its part says."""
    caches, pool = [part.cache for part in parts], parts[0].cache.pool
    starts = torch.tensor([0, *accumulate(part.count for part in parts)], dtype=torch.int32)
    spare = pool.spare_slot if pool.on_device else 0
    numbers = [(part.start, spare if part.cache.slot is None else part.cache.slot) for part in parts]
    position, slot = torch.tensor(numbers, dtype=torch.int32, device=pool.device).T.contiguous()
    longest = max(part.start + part.count for part in parts)
    tables = ragged_tables(caches)
    if pool.on_device:
        tables = [table.masked_fill(table == HOLE, pool.spare_page) for table in tables]
    rows = PassRows(starts, max(part.count for part in parts), position, tables, slot, longest=longest)
    if pool.on_device:
        of = [(n, part.start, part.count) for n, part in enumerate(parts)]
        prompts = [mine for mine, part in zip(of, parts, strict=True) if part.prompt]
        turns = of[: len(of) - len(prompts)]
        assert not any(part.prompt for part in parts[: len(turns)]), "rows that are being generated come first"
        rows.tables = RowTables.of(turns, prompts, pool.device)
    return rows


def ragged_tables(caches: list[SequenceCache]) -> list[Tensor]:
    """By page group the block tables of all sequences [sequences, pages]."""
    return [
        each[0][None] if len(each) == 1 else pad_sequence(list(each), batch_first=True)
        for each in zip(*(cache.tables for cache in caches), strict=True)
    ]


def pictures_of(together: Tensor, at: Tensor) -> Tensor:
    """First and last position of the picture that each row is part of, [rows, 2] int32; (1, 0) for the others."""
    found = torch.ones(len(together), 2, dtype=torch.int32, device=together.device)
    found[:, 1] = 0
    for number in together[together >= 0].unique():
        mine = together == number
        found[mine, 0], found[mine, 1] = at[mine].min(), at[mine].max()
    return found


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
