"""A flag for every setting of the server, made of its declaration in `forerun.serve.settings`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from forerun.serve.settings import ServeSettings


def with_settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags in place of its parameter `settings`, which it gets as `ServeSettings`."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(ServeSettings)
    lists = {entry.name for entry in fields(ServeSettings) if hints[entry.name] == tuple[str, ...]}
    flags = [_parameter(entry, hints[entry.name], entry.name in lists) for entry in fields(ServeSettings)]
    parameters = [given for one in own for given in (flags if one.name == "settings" else [one])]

    @wraps(command)
    def run(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        values |= {name: _split(values[name]) for name in lists}
        command(settings=ServeSettings(**values), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


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
