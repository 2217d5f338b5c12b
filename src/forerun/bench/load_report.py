"""What `forerun bench --load` prints, and draws: a row for each load and arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forerun.bench.load import OFF, ClosedLoop, LoadCell, OpenLoop
from forerun.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"
COLOURS = {OFF: "black", "auto": "C0", "lookup": "C1", "mtp": "C2", "assistant": "C3", "model": "C4"}
COLUMNS = ("tokens/s", "× off", "first token ms p50 / p95", "between tokens ms p50 / p95", "prompt rows", "equal")


def print_load(cells: Sequence[LoadCell], console: Console) -> None:
    """A table per temperature, and how to read it."""
    from rich.table import Table

    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        table = Table(title=f"temperature {temperature:g}", title_justify="left")
        table.add_column("load", justify="right")
        table.add_column("arm")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        before = None
        for cell in cells:
            if cell.temperature == temperature:
                if before not in (None, cell.load):
                    table.add_section()
                table.add_row(*row(cell))
                before = cell.load
        print_table(table, console)
    lines = ["× off: tokens/s over those without drafts in the same turn, median of turns (lowest–highest)"]
    lines.append("N clients: each asks again when it has its answer; N/s: requests come at random, so many a second")
    if any(cell.equal < cell.total for cell in cells):
        lines.append("no ratio where the texts differ")
    for line in lines:
        console.print(line, soft_wrap=True)


def row(cell: LoadCell) -> list[str]:
    """The columns of one cell, as text."""
    load, ratio, share = cell.load, cell.ratio, cell.prompt_share
    if isinstance(load, OpenLoop):
        name = f"{load.rate:.3g}/s"
    else:
        name = f"{load.clients} client{'s' if load.clients > 1 else ''}"
    return [
        name,
        cell.arm,
        f"{cell.tokens_per_second:.1f}",
        NONE if ratio is None else "{:.2f} ({:.2f}–{:.2f})".format(*ratio),
        _milliseconds(cell.first(50), cell.first(95)),
        _milliseconds(cell.between(50), cell.between(95)),
        NONE if share is None else f"{100 * share:.0f} %",
        f"{cell.equal} of {cell.total}",
    ]


def _milliseconds(*seconds: float | None) -> str:
    return " / ".join(
        NONE if value is None else f"{1000 * value:.0f}" if value >= 0.01 else f"{1000 * value:.1f}"
        for value in seconds
    )


def picture(cells: Sequence[LoadCell]) -> Any:
    """A row per temperature: × plain decoding and tokens per second by clients, then waiting by requests per second."""
    from forerun.bench.plot import pyplot

    temperatures = list(dict.fromkeys(cell.temperature for cell in cells))
    size = (13.0, 3.4 * len(temperatures))
    figure, axes = pyplot().subplots(len(temperatures), 3, figsize=size, squeeze=False, layout="constrained")
    for (ratios, speeds, waits), temperature in zip(axes, temperatures, strict=True):
        mine = [cell for cell in cells if cell.temperature == temperature]
        closed = [cell for cell in mine if isinstance(cell.load, ClosedLoop)]
        opened = [cell for cell in mine if isinstance(cell.load, OpenLoop)]
        for cell in closed:
            if cell.arm != OFF and cell.ratio is not None:
                ratios.plot([_place(cell)] * 2, cell.ratio[1:], color=COLOURS[cell.arm], linewidth=0.8)
        _lines(ratios, [cell for cell in closed if cell.arm != OFF], lambda cell: cell.ratio and cell.ratio[0])
        ratios.axhline(1.0, color="black", linewidth=0.8)
        ratios.set_ylabel("× plain decoding")
        ratios.set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
        _lines(speeds, closed, lambda cell: cell.tokens_per_second)
        speeds.set_ylabel("tokens per second")
        counts = sorted({cell.load.clients for cell in closed if isinstance(cell.load, ClosedLoop)})
        for panel in (ratios, speeds):
            panel.set_xscale("log", base=2)
            panel.set_xticks(counts, [str(count) for count in counts])
            panel.set_xlabel("clients")
        _lines(waits, opened, lambda cell: None if cell.first(95) is None else 1000 * (cell.first(95) or 0.0))
        waits.set_xlabel("requests per second")
        waits.set_ylabel("first token, p95, ms")
        # Beside the panels: inside one it would cover lines.
        lines, names = speeds.get_legend_handles_labels()
        waits.legend(lines, names, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _lines(panel: Any, cells: Sequence[LoadCell], height: Callable[[LoadCell], float | None]) -> None:
    """A line per arm, in the arm's own colour in every panel. A load without a figure leaves a gap."""
    for arm in dict.fromkeys(cell.arm for cell in cells):
        points = [(_place(cell), height(cell)) for cell in cells if cell.arm == arm]
        points.sort(key=lambda point: point[0])
        heights = [float("nan") if high is None else high for _, high in points]
        panel.plot([place for place, _ in points], heights, marker="o", color=COLOURS[arm], label=arm)
    if cells:
        panel.set_ylim(bottom=0)


def _place(cell: LoadCell) -> float:
    return cell.load.clients if isinstance(cell.load, ClosedLoop) else cell.load.rate
