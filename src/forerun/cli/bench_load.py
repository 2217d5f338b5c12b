"""`forerun bench --load` and `--url`: what was asked for is checked, then measured and shown."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError
from forerun.progress import Progress
from forerun.tables import output_console

if TYPE_CHECKING:
    from forerun.bench.load import LoadReport, LoadTarget
    from forerun.bench.workloads import Workload

PROMPT_TOKENS = 128  # of an answer to a prompt of the user's, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWish:
    """How much load, for how long, with which prompts."""

    clients: list[int] | None  # None: what suits the device
    shares: list[float]
    minutes: float
    workloads: list[Workload]
    temperatures: list[float]
    full: bool

    @classmethod
    def of(
        cls,
        *,
        clients: str | None,
        rates: str | None,
        minutes: float | None,
        workloads: Sequence[str],
        prompts: Path | None,
        temperatures: list[float],
        full: bool,
    ) -> LoadWish:
        """From flags; what cannot be meant is refused before a model is loaded for it."""
        from forerun.bench.load import MINUTES, SHARES, numbers, parse_clients

        minutes = MINUTES if minutes is None else minutes
        if not 0 < minutes < float("inf"):
            raise ForerunError(f"--minutes {minutes:g}: give more than 0")
        return cls(
            clients=None if clients is None else parse_clients(clients),
            shares=list(SHARES) if rates is None else numbers("--rates", rates, "0.5,0.8,1"),
            minutes=minutes,
            workloads=_workloads(workloads, prompts),
            temperatures=temperatures,
            full=full,
        )


def _workloads(names: Sequence[str], prompts: Path | None) -> list[Workload]:
    """The built-in ones, or a file's prompts as one."""
    from forerun.bench.workloads import Workload, WorkloadPrompt, load_workloads
    from forerun.train.prompts.files import read_prompts

    if prompts is None:
        return load_workloads(names)
    if names:
        raise ForerunError("--workload and --prompts both say what to ask: drop one of them")
    found = enumerate(read_prompts([prompts]), start=1)
    return [
        Workload(
            prompts.name, PROMPT_TOKENS, tuple(WorkloadPrompt(f"{n} of {prompts.name}", text) for n, text in found)
        )
    ]


def engine_load(model: str, loading: Mapping[str, Any], wish: LoadWish, progress: Progress) -> LoadReport:
    """Load a model here and measure its engine."""
    import gc

    import forerun
    from forerun.bench.engine_load import EngineTarget

    # Every arm gets the same prompts: what one has read must not help the next.
    target = EngineTarget(forerun.load(model, progress=progress, **{**loading, "prefix_cache": False}))
    gc.collect()
    gc.freeze()  # as the server does
    return _measured(_measure(target, wish, progress))


def server_load(url: str, key: str | None, wish: LoadWish, progress: Progress) -> LoadReport:
    """Measure a running server."""
    from forerun.bench.http_client import Address
    from forerun.bench.http_load import HttpTarget

    address = Address.of(url, key)

    async def measure() -> LoadReport:
        return await _measure(await HttpTarget.find(address), wish, progress)

    return _measured(measure())


async def _measure(target: LoadTarget, wish: LoadWish, progress: Progress) -> LoadReport:
    from forerun.bench.load import CLIENTS, CLIENTS_ON_CPU, LoadBench

    clients = wish.clients or (CLIENTS_ON_CPU if target.on_cpu else CLIENTS)
    bench = LoadBench(target, wish.workloads, minutes=wish.minutes, full=wish.full)
    return await bench.measure(clients, wish.shares, wish.temperatures, progress)


def _measured(measuring: Coroutine[Any, Any, LoadReport]) -> LoadReport:
    from forerun.bench.load import first_error

    try:
        return asyncio.run(measuring)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def show_load(report: LoadReport, as_json: bool, plot: Path | None) -> None:
    """As a table or as data, and as a picture."""
    from forerun.bench.load import to_data
    from forerun.bench.load_report import picture, print_load

    if as_json:
        print(json.dumps(to_data(report.cells)), flush=True)
    else:
        print_load(report.cells, output_console())
    if report.dropped:
        counted = "1 load" if report.dropped == 1 else f"{report.dropped} loads"
        print(f"forerun: no time was left for {counted}: give more with --minutes", file=sys.stderr)
    if plot is not None:
        from forerun.bench.plot import save

        save(picture(report.cells), plot)
