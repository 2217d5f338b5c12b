"""`forerun check`: what was found in a model, what it needs, and whether its rows keep their bits at every width."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from forerun.cli.flags import AsJson, ModelArgument, ModelOptions, Quiet, with_flags
from forerun.cli.terminal_progress import terminal_progress
from forerun.tables import output_console, print_table, readable_bytes, unnamed_columns

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from forerun.inspection import CheckReport


@with_flags("loading", ModelOptions)
def check(*, model: ModelArgument, loading: ModelOptions, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Inspect a model: its size, the memory plan, and the exactness probe."""
    loading.check()
    import forerun

    report = forerun.inspect_model(model, progress=terminal_progress(quiet), **loading.arguments())
    if as_json:
        print(json.dumps(report_to_dict(report), ensure_ascii=False), flush=True)
    else:
        _print_report(report)


def report_to_dict(report: CheckReport) -> dict[str, Any]:
    """The report as plain data, for `--json`."""
    about = ("family", "parameters", "layers", "hidden", "vocab", "context", "dtype", "drafters")
    memory = ("weights_bytes", "page_bytes", "cache_tokens", "cache_bytes")
    return {
        **{name: getattr(report, name) for name in about},
        "memory": {name: getattr(report, name) for name in memory},
        "probe": [{"width": width, "same": same} for width, same in report.probe],
        "guaranteed": report.guaranteed,
        "exactness_cost": report.exactness_cost,
        "notes": report.notes,
    }


def _print_report(report: CheckReport) -> None:
    console = output_console()
    for table in (_model_table(report), _memory_table(report), _probe_table(report)):
        print_table(table, console)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    _print_verdict(console, report)


def _print_verdict(console: Console, report: CheckReport) -> None:
    if report.exactness_cost is not None:
        console.print(
            f"price of exactness: a plain step's products take {report.exactness_cost:.2f} × the fastest ones"
        )
    if report.guaranteed:
        console.print("same text as plain decoding: guaranteed", style="bold green")
        return
    broken = [str(width) for width, same in report.probe if not same]
    where = f" (bits differ at width {', '.join(broken)})" if broken else ""
    console.print(f"same text as plain decoding: NOT GUARANTEED{where}", style="bold red", soft_wrap=True)


def _model_table(report: CheckReport) -> Table:
    table = unnamed_columns(2, "model")
    table.add_row("family", report.family)
    table.add_row("parameters", f"{_short_count(report.parameters)} ({report.parameters:,})")
    table.add_row("layers × hidden", f"{report.layers} × {report.hidden}")
    table.add_row("vocabulary", f"{report.vocab:,}")
    table.add_row("context", f"{report.context:,} tokens")
    table.add_row("computes in", report.dtype)
    table.add_row("drafters", ", ".join(report.drafters) or "none")
    return table


def _memory_table(report: CheckReport) -> Table:
    table = unnamed_columns(2, "memory plan")
    table.add_row("weights", readable_bytes(report.weights_bytes))
    table.add_row("cache", f"{readable_bytes(report.cache_bytes)} for {report.cache_tokens:,} tokens")
    table.add_row("one cache page", readable_bytes(report.page_bytes))
    table.add_row("together", readable_bytes(report.weights_bytes + report.cache_bytes))
    return table


def _probe_table(report: CheckReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="exactness probe", title_justify="left")
    table.add_column("width", justify="right")
    table.add_column("same bits as plain decoding")
    for width, same in report.probe:
        table.add_row(str(width), "same" if same else Text("DIFFERENT", style="bold red"))
    return table


def _short_count(count: int) -> str:
    """134515008 → `135M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{letter}" if value < 10 else f"{value:.0f}{letter}"
    return str(count)
