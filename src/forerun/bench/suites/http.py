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
from forerun.bench.http_load import HttpTarget
from forerun.bench.load import (
    JOBS_PER_CLIENT,
    LEAST_JOBS,
    OFF,
    ClosedLoop,
    Job,
    Jobs,
    LoadCell,
    LoadRun,
    parse_clients,
    to_data,
)
from forerun.bench.statistics import Interval, median
from forerun.bench.workloads import load_workloads
from forerun.weights.find import find

ARMS = (OFF, "auto")


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
    everything = Jobs(load_workloads())
    with ComparedServer(options.model) as server:
        target = asyncio.run(HttpTarget.find(server.address))
        for clients in numbers:
            jobs = everything.take(max(LEAST_JOBS, JOBS_PER_CLIENT * clients), 0.0)
            row = {arm: LoadCell(ClosedLoop(clients), arm, 0.0) for arm in ARMS}
            alone: dict[str, list[float]] = defaultdict(list)
            beside: dict[str, list[float]] = defaultdict(list)
            same = dict.fromkeys(ARMS, True)
            for arm in ARMS:  # both once, unmeasured
                server.engine_turn(jobs[:1], 1, arm)
                run_server(server, target, jobs[:1], 1, arm)
            for turn in range(options.turns):
                runs: dict[str, LoadRun] = {}
                for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                    rate, texts = server.engine_turn(jobs, clients, arm)
                    runs[arm], taken = run_server(server, target, jobs, clients, arm)
                    alone[arm].append(rate)
                    beside[arm].append(taken)
                    same[arm] &= texts == [answer.text for answer in runs[arm].answers]
                for arm, cell in row.items():
                    cell.add(runs[arm], runs[OFF])
            cells += row.values()
            results += [result(cell, alone[arm], beside[arm], same[arm]) for arm, cell in row.items()]
    for line in results:
        print(report_line(line))
    return {"overhead": results, "served": to_data(cells)}


def run_server(
    server: ComparedServer, target: HttpTarget, jobs: Sequence[Job], clients: int, arm: str
) -> tuple[LoadRun, float]:
    """One turn through HTTP, and the share of a core that the event loop and the clients took beside the engine."""
    before = server.loop_seconds() + time.process_time()
    run = asyncio.run(ClosedLoop(clients).run(jobs, partial(target.answer, arm=arm)))
    return run, (server.loop_seconds() + time.process_time() - before) / run.seconds


def result(cell: LoadCell, alone: Sequence[float], beside: Sequence[float], same: bool) -> dict[str, Any]:
    """Rates of both, and the overhead turn by turn; none where a text differs."""
    assert isinstance(cell.load, ClosedLoop)
    overhead: Interval | None = None
    if same:
        overhead = median([1 - served / engine for served, engine in zip(cell.speeds, alone, strict=True)])
    return {
        "clients": cell.load.clients,
        "arm": cell.arm,
        "engine_tokens_per_second": median(alone).value,
        "served_tokens_per_second": cell.tokens_per_second,
        "overhead": None if overhead is None else overhead.value,
        "interval": None if overhead is None else [overhead.low, overhead.high],
        "core_share": median(beside).value,
        "auto_over_off": None if cell.arm == OFF or cell.ratio is None else cell.ratio[0],
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
