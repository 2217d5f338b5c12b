"""A flag for every generation option, made of its declaration in `forerun.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_type_hints

import typer

from forerun.cli.flag_groups import with_flags
from forerun.cli.options import parse_draft_tokens, parse_logit_bias, parse_suppress, require_positive
from forerun.errors import ForerunError
from forerun.options import GenerationOptions

# What is typed in another form than the library takes: its type on the command line, and how to read it.
TYPED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "logit_bias": (list[str] | None, lambda texts: parse_logit_bias(texts or [])),
    "suppress": (list[str] | None, lambda texts: parse_suppress(texts or [])),
    "stop": (list[str] | None, lambda texts: texts or []),
    **dict.fromkeys(("images", "videos", "audio"), (list[str] | None, lambda files: files or None)),
    "draft_tokens": (str, parse_draft_tokens),
}


def with_generation_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these flags in place of its parameter `options`, which it gets as `GenerationOptions`."""
    flags = [_parameter(entry) for entry in fields(GenerationOptions)]
    return with_flags(command, "options", flags, _options)


def _options(values: dict[str, Any]) -> GenerationOptions:
    require_positive("--max-tokens", values["max_tokens"])
    return GenerationOptions(**values | {name: read(values[name]) for name, (_, read) in TYPED.items()})


def _parameter(entry: Field[Any]) -> inspect.Parameter:
    """What typer makes one flag of."""
    facts = entry.metadata
    flag = facts.get("flag", "--" + entry.name.replace("_", "-"))
    option = typer.Option(
        *(flag, *facts.get("flags", ())),
        help=facts["help"],
        metavar=facts.get("metavar"),
        rich_help_panel=facts["topic"],
    )
    typed = TYPED[entry.name][0] if entry.name in TYPED else get_type_hints(GenerationOptions)[entry.name]
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=Annotated[typed, option]
    )


def parse_option(name: str, text: str) -> Any:
    """An option's value as it is typed behind its name: `/set temperature=0.8`."""
    hints = get_type_hints(GenerationOptions)
    if name not in hints:
        near = get_close_matches(name, hints, n=1)
        raise ForerunError(f"there is no option {name!r}: " + (f"did you mean {near[0]}?" if near else "see /help"))
    if text in ("", "none", "default"):
        return next(entry.default for entry in fields(GenerationOptions) if entry.name == name)
    if name in TYPED:
        typed, read = TYPED[name]
        return read(text if typed is str else [text])
    kinds = [kind for kind in get_args(hints[name]) or (hints[name],) if kind is not type(None)]
    if not isinstance(kinds[0], type):  # the words of a Literal
        if text not in kinds:
            raise ForerunError(f"{name} must be one of {', '.join(map(str, kinds))}, not {text!r}")
        return text
    try:
        return kinds[0](text)
    except ValueError:
        wanted = "a whole number" if kinds[0] is int else "a number"
        raise ForerunError(f"{name} must be {wanted}, not {text!r}") from None
