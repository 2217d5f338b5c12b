"""`forerun bench --plot`: bars of every arm over plain decoding, workload by workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.runner import PLAIN, Cell
from forerun.errors import ForerunError

WIDTH = 0.8  # of the place of a workload that its bars fill


def pyplot() -> Any:
    """matplotlib, drawing into files only."""
    try:
        import matplotlib
    except ImportError:
        raise ForerunError("--plot needs matplotlib: pip install 'forerun[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def check(path: Path) -> None:
    """Found out before a quarter of an hour of measuring, not after it."""
    pyplot()
    if not path.parent.is_dir():
        raise ForerunError(f"--plot {path}: there is no folder {path.parent}")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ForerunError(f"--plot {path}: end the name with the kind of picture, one of {', '.join(known)}")


def save(figure: Any, path: Path) -> None:
    """Write a picture to a file."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ForerunError(f"cannot write the plot to {path}: {error}") from error
    pyplot().close(figure)


def picture(cells: Sequence[Cell]) -> Any:
    """One panel per temperature, one bar per workload and arm, with the ends of its interval."""
    temperatures = list(dict.fromkeys(cell.temperature for cell in cells))
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    arms = [arm for arm in dict.fromkeys(cell.arm for cell in cells) if arm != PLAIN]
    size = (3.5 + 1.1 * len(workloads), 3.2 * len(temperatures))
    figure, axes = pyplot().subplots(len(temperatures), 1, figsize=size, squeeze=False, layout="constrained")
    for (panel,), temperature in zip(axes, temperatures, strict=True):
        for number, arm in enumerate(arms):
            offset = (number - (len(arms) - 1) / 2) * WIDTH / len(arms)
            _bars(panel, [c for c in cells if c.arm == arm and c.temperature == temperature], workloads, offset, arms)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(workloads)), workloads)
        panel.set_ylabel("× plain decoding")
        panel.set_title(f"temperature {temperature:g}", loc="left", fontsize=10)
        # Beside the panel: above it a narrow one has no room for both the title and the names of all arms.
        panel.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _bars(panel: Any, cells: Sequence[Cell], workloads: list[str], offset: float, arms: list[str]) -> None:
    shown = [(cell, cell.ratio) for cell in cells]
    places = [workloads.index(cell.workload) + offset for cell, ratio in shown if ratio is not None]
    ratios = [ratio for _, ratio in shown if ratio is not None]
    below = [ratio.value - ratio.low for ratio in ratios]
    above = [ratio.high - ratio.value for ratio in ratios]
    values = [ratio.value for ratio in ratios]
    if values:
        panel.bar(places, values, WIDTH / len(arms), yerr=[below, above], label=cells[0].arm, error_kw={"lw": 0.8})
