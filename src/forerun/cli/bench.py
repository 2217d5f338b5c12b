"""`forerun bench`: what drafting brings on ten kinds of work, with equal texts or no figure at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from forerun.cli.flags import LoadOptions, ModelName, Quiet, output_option, panel, with_flags
from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError
from forerun.tables import output_console

work, under_load = panel("Work"), panel("Load")
TEMPERATURES = [0.0, 0.8]


class Against(StrEnum):
    """Other engines."""

    transformers = "transformers"
    llama_cpp = "llama.cpp"


@with_flags("loading", LoadOptions)
def bench(
    *,
    model: ModelName = "smollm2",
    workload: Annotated[list[str] | None, work("--workload", "-w", help="Only this kind of work; repeatable.")] = None,
    prompts: Annotated[
        Path | None,
        work(
            metavar="FILE",
            help="With --load: these prompts (text, one per line, or JSON lines), not the built-in ones.",
        ),
    ] = None,
    temperature: Annotated[
        list[str] | None, work("--temperature", "--temp", help="Repeatable, or with commas; default: 0,0.8.")
    ] = None,
    full: Annotated[bool, work("--full", help="All prompts, not a sample of each kind.")] = False,
    against: Annotated[list[Against] | None, work(help="Another engine on the same prompts; repeatable.")] = None,
    load: Annotated[bool, under_load("--load", help="Several clients at once, then requests at random times.")] = False,
    url: Annotated[str | None, under_load(help="Load on a running server, over HTTP.")] = None,
    api_key: Annotated[str | None, under_load(envvar="FORERUN_API_KEY", help="The server's key.")] = None,
    clients: Annotated[
        str | None, under_load(metavar="N,N,…", help="At once; default: 1,2,4,8,16,32,64, on a CPU 1,4,16.")
    ] = None,
    rates: Annotated[
        str | None,
        under_load(metavar="X,X,…", help="Requests at random, by what most clients got done; default: 0.5,0.8,1."),
    ] = None,
    minutes: Annotated[float | None, under_load(help="At most so long; default: 15.")] = None,
    loading: LoadOptions,
    plot: Annotated[Path | None, output_option(metavar="FILE", help="The figures as a picture.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print a JSON list on stdout, nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure plain decoding and every way to draft, interleaved; texts that differ get no speed-up.

    With --load or --url the same for several clients at once: tokens per second and times between tokens.
    """
    loading.check(one_drafter=False)
    temperatures = _temperatures(temperature or [])
    if plot is not None:
        from forerun.bench.plot import check

        check(plot)
    if url is not None:
        given = ["--model"] if model != "smollm2" else []
        for flag in given + loading.given():
            raise ForerunError(f"{flag} has no meaning with --url, where the server has its own model: drop it")
    if load or url is not None:
        if against:
            raise ForerunError("--against compares one answer at a time: drop it, or --load and --url")
        from forerun.cli.bench_load import LoadWish, engine_load, server_load, show_load

        wish = LoadWish.of(
            clients=clients,
            rates=rates,
            minutes=minutes,
            workloads=workload or (),
            prompts=prompts,
            temperatures=temperatures,
            full=full,
        )
        progress = terminal_progress(quiet)
        if url is not None:
            measured = server_load(url, api_key, wish, progress)
        else:
            measured = engine_load(model, loading.arguments(), wish, progress)
        show_load(measured, as_json, plot)
        return
    others = {"--clients": clients, "--rates": rates, "--minutes": minutes, "--prompts": prompts}
    for flag, value in others.items():
        if value is not None:
            raise ForerunError(f"{flag} belongs to --load and --url: give one of them too")
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
        from forerun.bench.plot import picture, save

        save(picture(report.cells), plot)


def _temperatures(given: Sequence[str]) -> list[float]:
    """`["0,0.8"]` or `["0", "0.8"]` → `[0.0, 0.8]`."""
    found = []
    for part in (part for text in given for part in text.split(",")):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ForerunError(f"--temperature {part}: give 0 or more")
        found.append(value)
    return list(dict.fromkeys(found)) or list(TEMPERATURES)
