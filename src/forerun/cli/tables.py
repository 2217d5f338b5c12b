"""Tables on stdout, for people and for pipes, and sizes in them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def output_console() -> Console:
    """Without a terminal rich would wrap at 80 columns; whoever reads a pipe wants whole lines."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)


def unnamed_columns(count: int, title: str) -> Table:
    """A table without a header."""
    from rich.table import Table

    return Table(*[""] * count, title=title, title_justify="left", show_header=False)


def print_table(table: Table, console: Console) -> None:
    """With lines on a terminal; columns alone for grep and friends."""
    if not console.is_terminal:
        table.box = None
    console.print(table, markup=False)


def readable_bytes(count: int) -> str:
    """1536 → `1.5 KiB`: in binary units, as memory is sold."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
