"""`forerun bench --url`: measures a running server over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

from forerun.cli.terminal_progress import terminal_progress
from forerun.errors import ForerunError


def bench_server(
    url: str,
    api_key: str | None,
    clients: list[int],
    workloads: list[str],
    temperatures: list[float],
    *,
    full: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure and print."""
    from forerun.bench.http_client import Address
    from forerun.bench.http_load import measure_load, to_data
    from forerun.bench.http_report import print_load

    measuring = measure_load(
        Address.of(url, api_key),
        clients=clients,
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
    from rich.console import Console

    print_load(cells, Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200))


def refuse_with_url(**given: bool) -> None:
    """Flags that would be ignored are errors."""
    for name, is_given in given.items():
        if is_given:
            flag = "--" + name.replace("_", "-")
            raise ForerunError(f"{flag} has no meaning with --url, where the server has its own model: drop it")


def parse_clients(text: str) -> list[int]:
    """`1,4,16` → `[1, 4, 16]`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise ForerunError(f"--clients {text}: give numbers from 1 to 1024 with commas, for example 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
