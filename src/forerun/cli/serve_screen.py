"""What `forerun serve` prints before it serves: settings and where they come from, the memory plan, the address."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from forerun.cli.sources import Sources
from forerun.serve.settings import ServeSettings
from forerun.tables import output_console, print_table, readable_bytes, unnamed_columns

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.language_model import LanguageModel
    from forerun.memory_plan import MemoryPlan, PlannedDrafter


def print_settings(settings: ServeSettings, others: Mapping[str, Any], sources: Sources) -> None:
    """One line per setting that is not at its default, with who set it."""
    table = unnamed_columns(3, "settings")
    table.add_row("model", str(others["model"]), sources.get("model", "default"))
    for name, value in (*others.items(), *shown_values(settings).items()):
        source = sources.get(name)
        if source is not None and name != "model":
            table.add_row(name.replace("_", "-"), str(value), source)
    print_table(table, output_console())


def shown_values(settings: ServeSettings) -> dict[str, str]:
    """Every setting as it may be shown: secrets are not."""
    shown = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if isinstance(value, tuple):
            value = ", ".join(value)
        shown[entry.name] = "••••" if entry.metadata.get("secret") and value is not None else str(value)
    return shown


def print_plan(loaded: LanguageModel) -> None:
    """What the model holds, who drafts, what is left; and whether drafts are sure not to change the text."""
    from forerun.memory_plan import memory_plan

    plan = memory_plan(loaded)
    print_table(plan_table(plan), output_console())
    if loaded.media is not None:
        from forerun.media.reading import what_is_read

        print(f"reads {what_is_read(loaded.media)}")
    for warning in [*loaded.notes, *loaded.head_warnings]:
        print(f"warning: {warning}", flush=True)
    if not loaded.probe.guaranteed:
        print("warning: wide passes change bits on this machine: NOT GUARANTEED, see forerun check", flush=True)


def plan_table(plan: MemoryPlan) -> Table:
    """The memory plan."""
    table = unnamed_columns(3, "memory plan")
    table.add_row("weights", readable_bytes(plan.weights), "")
    for drafter in plan.drafters:
        table.add_row(f"drafter {drafter.name}", readable_bytes(drafter.weights + drafter.cache), _about(drafter))
    contexts = plan.cache_tokens // plan.context
    held = f"{contexts} full contexts of {plan.context:,}" if contexts else f"less than one context of {plan.context:,}"
    table.add_row("cache", readable_bytes(plan.cache), f"{plan.cache_tokens:,} tokens, {held}")
    if plan.state:
        table.add_row("recurrent state", readable_bytes(plan.state), "")
    if plan.towers:
        table.add_row("towers", readable_bytes(plan.towers), "loaded when the first images, videos or audio come")
    table.add_row("together", readable_bytes(plan.total), f"{readable_bytes(plan.left)} left")
    return table


def _about(drafter: PlannedDrafter) -> str:
    parts = f"{readable_bytes(drafter.weights)} weights, {readable_bytes(drafter.cache)} cache"
    return f"{drafter.about}: {parts}" if drafter.weights else drafter.about


def print_address(settings: ServeSettings, name: str) -> None:
    """Where to point a client and a browser, and a line to paste; `name` is what clients call the model."""
    base = base_url(settings.host, settings.port)
    key = " -H 'Authorization: Bearer '\"$FORERUN_API_KEY\"" if settings.api_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    lines = [f"serving {name} at {base}/v1"]
    if settings.page:
        lines.append(f"page: {base}/")
    lines.append(
        f"try: curl {base}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
    print("\n".join(lines), flush=True)


def base_url(host: str, port: int) -> str:
    """An address that this machine can open: a server that listens everywhere is reached on loopback."""
    if host in ("0.0.0.0", "::", "[::]"):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{port}"
