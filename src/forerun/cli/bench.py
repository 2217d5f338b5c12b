"""`forerun bench`: what drafting brings on ten kinds of work, with equal texts or no figure at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from forerun.cli.flags import LoadOptions, ModelName, Quiet, output_option, panel, with_flags
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.tables import output_console

work, server = panel("Work"), panel("Server")
TEMPERATURES = (0.0, 0.8)
SERVED_TEMPERATURES = (0.0,)
CLIENTS = "1,4,16"


class Against(StrEnum):
    """Other engines."""

    transformers = "transformers"
    llama_cpp = "llama.cpp"


@with_flags("loading", LoadOptions)
def bench(
    *,
    model: ModelName = "smollm2",
    workload: Annotated[list[str] | None, work("--workload", "-w", help="Only this kind of work; repeatable.")] = None,
    temperature: Annotated[
        list[float] | None, work("--temperature", "--temp", help="Repeatable; default: 0 and 0.8, with --url 0.")
    ] = None,
    url: Annotated[str | None, server(help="Measure a running server instead, over HTTP.")] = None,
    clients: Annotated[str, server(metavar="N,N,…", help="With --url: at once.")] = CLIENTS,
    api_key: Annotated[str | None, server(envvar="FORERUN_API_KEY", help="The server's key.")] = None,
    full: Annotated[bool, work("--full", help="All prompts, not a sample of each kind.")] = False,
    against: Annotated[list[Against] | None, work(help="Another engine on the same prompts; repeatable.")] = None,
    loading: LoadOptions,
    plot: Annotated[Path | None, output_option(metavar="FILE", help="Bars as a picture.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print a JSON list on stdout, nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure plain decoding and every way to draft, interleaved; texts that differ get no speed-up.

    With --url the same for a running server: tokens per second, time to the first text and between texts.
    """
    loading.check(one_drafter=False)
    defaults = TEMPERATURES if url is None else SERVED_TEMPERATURES
    temperatures = list(dict.fromkeys(temperature)) if temperature else list(defaults)
    for value in temperatures:
        if not 0 <= value < float("inf"):
            raise ForerunError(f"--temperature {value}: give 0 or more")
    if url is not None:
        others = {"--model": model != "smollm2", "--against": bool(against), "--plot": plot is not None}
        for flag in [*(name for name, given in others.items() if given), *loading.given()]:
            raise ForerunError(f"{flag} has no meaning with --url, where the server has its own model: drop it")
        _bench_server(*(url, api_key, clients, workload or [], temperatures), full=full, as_json=as_json, quiet=quiet)
        return
    if clients != CLIENTS:
        raise ForerunError("--clients needs a server: give its address with --url")
    if plot is not None:
        from forerun.bench.plot import check

        check(plot)
    from forerun.bench.suites.work import run_bench
    from forerun.bench.workloads import load_workloads

    load_workloads(workload or ())  # a misspelt name should not cost a model load
    report = run_bench(
        model,
        workloads=workload or (),
        temperatures=temperatures,
        full=full,
        peers=[peer.value for peer in dict.fromkeys(against or ())],
        loading=loading.arguments(),
        progress=terminal_progress(quiet),
    )
    from forerun.bench.report import print_report, to_data

    if as_json:
        print(json.dumps(to_data(report.cells), ensure_ascii=False), flush=True)
    else:
        print_report(report.cells, report.price, output_console())
    if plot is not None:
        from forerun.bench.plot import draw

        draw(report.cells, plot)


def _bench_server(
    url: str,
    api_key: str | None,
    clients: str,
    workloads: list[str],
    temperatures: list[float],
    *,
    full: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure and print."""
    from forerun.bench.http_client import Address
    from forerun.bench.http_load import measure_load, parse_clients, to_data
    from forerun.bench.http_report import print_load

    measuring = measure_load(
        Address.of(url, api_key),
        clients=parse_clients(clients),
        workloads=workloads,
        temperatures=temperatures,
        full=full,
        progress=terminal_progress(quiet),
    )
    try:
        cells = asyncio.run(measuring)
    except BaseExceptionGroup as errors:  # clients fail together when the server goes: one line is enough
        raise next(_leaves(errors)) from None
    if as_json:
        print(json.dumps(to_data(cells)), flush=True)
        return
    print_load(cells, output_console())


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
