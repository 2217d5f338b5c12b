"""What `forerun bench` prints: a table per temperature, the means over all workloads, or plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.runner import NAMED_ARMS, PLAIN, Cell
from forerun.bench.statistics import geometric_mean, median
from forerun.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SHOWN_POSITIONS = 4
NONE = "–"


def to_data(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One entry per cell; `ratio` and its 95 % interval are null where the texts differ."""
    return [
        {
            "workload": cell.workload,
            "arm": cell.arm,
            "temperature": cell.temperature,
            "tokens_per_second": cell.tokens_per_second,
            "ratio": None if cell.ratio is None else cell.ratio.value,
            "interval": None if cell.ratio is None else [cell.ratio.low, cell.ratio.high],
            "tokens_per_round": cell.tokens_per_round,
            "accepted_per_position": cell.accepted_per_position,
            "equal": cell.equal,
            "total": cell.total,
        }
        for cell in cells
    ]


def print_report(cells: Sequence[Cell], price: float | None, console: Console) -> None:
    """The tables, then one line per arm over all workloads."""
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        mine = [cell for cell in cells if cell.temperature == temperature]
        print_table(_table(mine, price, temperature), console)
        for line in summary(mine):
            console.print(line, soft_wrap=True)
    for line in remarks(cells, price):
        console.print(line, soft_wrap=True)


def _table(cells: Sequence[Cell], price: float | None, temperature: float) -> Table:
    from rich.table import Table

    table = Table(title=f"temperature {temperature:g}", title_justify="left")
    for name in ("workload", "arm"):
        table.add_column(name)
    for name in ("tokens/s", "× plain", "with prompt", "tokens/round", "accepted at 1, 2, …", "equal", "exactness"):
        table.add_column(name, justify="right")
    for index, cell in enumerate(cells):
        if index and cells[index - 1].workload != cell.workload:
            table.add_section()
        table.add_row(*row(cell, price))
    return table


def row(cell: Cell, price: float | None) -> list[str]:
    """The columns of one cell, as text."""
    positions = [f".{100 * share:02.0f}" if share < 0.995 else "1" for share in cell.accepted_per_position]
    return [
        cell.workload,
        cell.arm,
        f"{cell.tokens_per_second:.1f}",
        NONE if cell.ratio is None else str(cell.ratio),
        NONE if cell.whole_ratio is None else f"{cell.whole_ratio.value:.2f}",
        NONE if cell.tokens_per_round is None else f"{cell.tokens_per_round:.2f}",
        " ".join(positions[:SHOWN_POSITIONS]) or NONE,
        f"{cell.equal} of {cell.total}",
        f"{price:.2f}×" if price is not None and cell.arm == PLAIN else NONE,
    ]


def summary(cells: Sequence[Cell]) -> list[str]:
    """Per arm: the geometric mean over the workloads, if every text is equal."""
    lines = []
    for arm in dict.fromkeys(cell.arm for cell in cells):
        mine = [cell for cell in cells if cell.arm == arm]
        equal, total = sum(cell.equal for cell in mine), sum(cell.total for cell in mine)
        texts = f"{equal} of {total} texts equal"
        groups = [cell.ratios for cell in mine if cell.ratios]
        if equal < total or not groups:
            lines.append(f"{arm}: {texts}, so no ratio")
        elif arm == PLAIN:
            lines.append(f"plain against plain, the noise floor: {geometric_mean(groups)}×, {texts}")
        else:
            lines.append(f"{arm}: {geometric_mean(groups)}× plain over {len(groups)} workloads, {texts}")
    best = against_best(cells)
    return lines if best is None else [*lines, best]


def against_best(cells: Sequence[Cell]) -> str | None:
    """`auto` over the best single arm of each workload, prompt by prompt; plain decoding is one of the arms."""
    parts = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        mine = {cell.arm: cell for cell in cells if cell.workload == workload and cell.ratio is not None}
        auto = mine.pop("auto", None)
        if auto is None:
            continue
        rates = {arm: median(cell.ratios).value for arm, cell in mine.items() if arm in NAMED_ARMS}
        best = max(rates, key=lambda arm: rates[arm], default=None)
        if best is None or rates[best] < 1:
            parts.append(f"{workload} {median(auto.ratios)} {PLAIN}")
        else:
            pairs = zip(auto.ratios, mine[best].ratios, strict=True)
            parts.append(f"{workload} {median([ours / theirs for ours, theirs in pairs])} {best}")
    return "auto over the best single arm: " + ", ".join(parts) if parts else None


def remarks(cells: Sequence[Cell], price: float | None) -> list[str]:
    """How to read the table."""
    lines = ["× plain: seconds of plain decoding / seconds of this arm, median of pairs (95 % interval, bootstrap)"]
    if price is not None:
        lines.append("exactness: what it costs a plain step's products; plain is counted as if it did not pay that")
    if any(not cell.same for cell in cells):
        lines.append("no ratio where the texts differ")
    return lines
