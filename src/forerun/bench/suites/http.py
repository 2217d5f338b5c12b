"""What serving costs: the same requests straight through an engine and through HTTP, in turns."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from forerun.bench.compared_server import ComparedServer
from forerun.bench.http_load import (
    ARMS,
    Job,
    LoadCell,
    ask,
    closed_loop,
    compare,
    make_jobs,
    parse_clients,
    to_data,
)
from forerun.bench.statistics import Interval, median
from forerun.bench.workloads import load_workloads
from forerun.weights.find import find


def add_options(parser: ArgumentParser) -> None:
    """What to serve, and to how many."""
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--turns", type=int, default=3)


def measure(options: Namespace) -> dict[str, Any]:
    """Engine and server in turns, arm by arm. `overhead` is the share of the engine's own rate that serving takes."""
    numbers = parse_clients(options.clients)
    find(options.model)
    cells: list[LoadCell] = []
    results: list[dict[str, Any]] = []
    with ComparedServer(options.model) as server:
        for clients in numbers:
            jobs = make_jobs(load_workloads(), 0.0, clients, full=False)
            row = {arm: LoadCell(clients, arm, 0.0) for arm in ARMS}
            alone: dict[str, list[float]] = defaultdict(list)
            beside: dict[str, list[float]] = defaultdict(list)
            texts: dict[str, str] = {}
            warm_up(server, jobs[0])
            for turn in range(options.turns):
                for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                    rate, said = server.engine_turn(jobs, clients, arm)
                    alone[arm].append(rate)
                    texts |= said
                    beside[arm].append(run_server(server, jobs, clients, row[arm]))
            compare(row)
            cells += row.values()
            for arm, cell in row.items():
                same = all(answer.text == texts[name] for name, answer in cell.answers)
                results.append(result(cell, alone[arm], beside[arm], same))
    for line in results:
        print(report_line(line))
    return {"overhead": results, "served": to_data(cells)}


def warm_up(server: ComparedServer, job: Job) -> None:
    """Both once, unmeasured."""
    for arm in ARMS:
        server.engine_turn([job], 1, arm)
        asyncio.run(ask(server.address, job, arm))


def run_server(server: ComparedServer, jobs: Sequence[Job], clients: int, cell: LoadCell) -> float:
    """One turn through HTTP. Gives the share of a core that the event loop and the clients took beside the engine."""
    before = server.loop_seconds() + time.process_time()
    answers, seconds = asyncio.run(closed_loop(jobs, clients, partial(ask, server.address, arm=cell.arm)))
    taken = server.loop_seconds() + time.process_time() - before
    cell.add(answers, seconds)
    return taken / seconds


def result(cell: LoadCell, alone: Sequence[float], beside: Sequence[float], same: bool) -> dict[str, Any]:
    """Rates of both, and the overhead turn by turn; none where a text differs."""
    overhead: Interval | None = None
    if same:
        overhead = median([1 - served / engine for served, engine in zip(cell.rates, alone, strict=True)])
    return {
        "clients": cell.clients,
        "arm": cell.arm,
        "engine_tokens_per_second": median(alone).value,
        "served_tokens_per_second": cell.tokens_per_second,
        "overhead": None if overhead is None else overhead.value,
        "interval": None if overhead is None else [overhead.low, overhead.high],
        "core_share": median(beside).value,
        "auto_over_off": None if cell.ratio is None else cell.ratio.value,
        "same_texts": same,
    }


def report_line(line: dict[str, Any]) -> str:
    """For people."""
    overhead = "texts differ" if line["overhead"] is None else f"overhead {100 * line['overhead']:.1f} %"
    ratio = "" if line["auto_over_off"] is None else f", {line['auto_over_off']:.2f}× off"
    return (
        f"{line['clients']:3} clients, {line['arm']:4}: engine {line['engine_tokens_per_second']:.1f} tok/s, "
        f"served {line['served_tokens_per_second']:.1f} tok/s, {overhead}{ratio}, "
        f"{100 * line['core_share']:.1f} % of a core beside the engine"
    )
