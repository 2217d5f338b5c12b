"""Flags that belong together and come to a command as one value: how typer is told of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any


def with_flags(
    command: Callable[..., None],
    name: str,
    flags: Sequence[inspect.Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """The command with these flags in place of its parameter `name`, which it gets as what `make` makes of them."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [given for one in own for given in (flags if one.name == name else [one])]

    @wraps(command)
    def run(**given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        command(**{name: make(values)}, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
