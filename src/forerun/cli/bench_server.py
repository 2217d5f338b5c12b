"""`forerun bench --url`: measures a running server over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from forerun.cli.tables import output_console
from forerun.cli.terminal_progress import terminal_progress


def bench_server(
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
