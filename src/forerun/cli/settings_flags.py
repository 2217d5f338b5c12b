"""A flag for every setting of the server, made of its declaration in `forerun.serve.settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from forerun.cli.flag_groups import with_flags
from forerun.serve.settings import ServeSettings


def with_settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags in place of its parameter `settings`, which it gets as `ServeSettings`."""
    hints = get_type_hints(ServeSettings)
    lists = {entry.name for entry in fields(ServeSettings) if hints[entry.name] == tuple[str, ...]}
    flags = [_parameter(entry, hints[entry.name], entry.name in lists) for entry in fields(ServeSettings)]

    def make(values: dict[str, Any]) -> ServeSettings:
        return ServeSettings(**values | {name: _split(values[name]) for name in lists})

    return with_flags(command, "settings", flags, make)


def _parameter(entry: Field[Any], kind: Any, listed: bool) -> inspect.Parameter:
    """What typer makes one flag of."""
    flag = "--" + entry.name.replace("_", "-")
    name = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    facts = entry.metadata
    option = typer.Option(
        name,
        help=facts["help"] + (" Repeatable, or with commas." if listed else ""),
        rich_help_panel=facts["topic"],
    )
    typed = list[str] | None if listed else kind
    default = None if listed else entry.default
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, option]
    )


def _split(texts: list[str] | None) -> tuple[str, ...]:
    """`["a,b", "c"]` → `("a", "b", "c")`."""
    return tuple(part.strip() for text in texts or () for part in text.split(",") if part.strip())
