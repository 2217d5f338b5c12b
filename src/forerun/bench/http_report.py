"""What `forerun bench --url` prints: a row for each number of clients and arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.bench.http_load import LoadCell
from forerun.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"


def print_load(cells: Sequence[LoadCell], console: Console) -> None:
    """The table, and how to read it."""
    from rich.table import Table

    columns = ("tokens/s", "× off", "first text ms p50/p90/p99", "between texts ms", "ms per token", "equal")
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        table = Table(title=f"temperature {temperature:g}", title_justify="left")
        table.add_column("clients", justify="right")
        table.add_column("arm")
        for name in columns:
            table.add_column(name, justify="right")
        for cell in cells:
            if cell.temperature == temperature:
                table.add_row(*row(cell))
        print_table(table, console)
    console.print("× off: tokens/s over those without drafts, median of turns (95 % interval, bootstrap)")
    if any(cell.equal < cell.total for cell in cells):
        console.print("no ratio where the texts differ")


def row(cell: LoadCell) -> list[str]:
    """The columns of one cell, as text."""
    return [
        str(cell.clients),
        cell.arm,
        f"{cell.tokens_per_second:.1f}",
        NONE if cell.ratio is None else str(cell.ratio),
        _milliseconds(cell.first),
        _milliseconds(cell.gaps),
        _milliseconds(cell.per_token),
        f"{cell.equal} of {cell.total}",
    ]


def _milliseconds(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1000 * value:.0f}" if value >= 0.01 else f"{1000 * value:.1f}" for value in seconds)
