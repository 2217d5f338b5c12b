"""Rows of passes as the engine describes them, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from forerun.kernels.interface import PassRows, RecurrentLayer, RowTables, Staged


def ragged(
    counts: list[int], positions: list[int], tables: list[list[int]], device: torch.device | str = "cpu"
) -> PassRows:
    """Each sequence with as many rows as it likes; block tables are padded with page 0."""
    most = max(map(len, tables))
    table = [mine + [0] * (most - len(mine)) for mine in tables]
    return PassRows(
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        max(counts),
        torch.tensor(positions, dtype=torch.int32, device=device),
        [torch.tensor(table, dtype=torch.int32, device=device)],
        torch.zeros(len(counts), dtype=torch.int32, device=device),
        longest=max(map(sum, zip(counts, positions, strict=True))),
    )


def one_sequence(rows: PassRows, sequence: int, offset: int = 0, count: int | None = None) -> PassRows:
    """Some rows of one sequence of a pass, alone: `count` from row `offset` of its own on, or all."""
    every = int(rows.query_start[sequence + 1] - rows.query_start[sequence])
    count = every - offset if count is None else count
    here = slice(sequence, sequence + 1)
    tables = [table[here] for table in rows.block_tables]
    return PassRows.uniform(count, rows.position[here] + offset, tables, rows.slot[here], rows.states)


def tabled(
    turns: Sequence[tuple[int, int, int]],
    prompts: Sequence[tuple[int, int, int]],
    pages: Tensor,
    rows: int = 0,
    spare: int = 0,
    entries: tuple[int, int, int] = (0, 0, 0),
) -> PassRows:
    """A pass of a GPU over owners with the block table `pages` [owners, pages]; the rest as in `RowTables.of`."""
    tables = RowTables.of(turns, prompts, pages.device, rows, spare, entries)
    owners = torch.zeros(len(pages), dtype=torch.int32, device=pages.device)
    return PassRows(torch.zeros(1, dtype=torch.int32), 0, owners, [pages], owners, tables=tables)


def recurrent(
    work: Sequence[tuple[int, int]], states: Sequence[RecurrentLayer], staged: Staged | None, device: torch.device
) -> PassRows:
    """Rows of recurrent layers alone: slot and number of rows of each sequence."""
    counts, slots = [count for _, count in work], [slot for slot, _ in work]
    rows = ragged(counts, [0] * len(work), [[0]] * len(work), device)
    rows.slot = torch.tensor(slots, dtype=torch.int32, device=device)
    rows.states = states
    rows.staged = () if staged is None else [staged]
    return rows
