"""Tables on stdout, for people and for pipes, and sizes in them."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def output_console() -> Console:
    """As wide as tables may want to be: rich would cut figures to fit a narrow window, or 80 columns of a pipe."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, width=200)


def unnamed_columns(count: int, title: str) -> Table:
    """A table without a header."""
    from rich.table import Table

    return Table(*[""] * count, title=title, title_justify="left", show_header=False)


def print_table(table: Table, console: Console) -> None:
    """With lines on a terminal that has room for them; columns alone elsewhere, for grep and friends."""
    if not console.is_terminal or console.measure(table).maximum > shutil.get_terminal_size().columns:
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
