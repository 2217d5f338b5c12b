"""Where a setting comes from: the command line, a FORERUN_* variable, the file of `--config`, or its default."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import OptionInfo

from forerun.cli.flags import flag_of, with_parameters
from forerun.errors import ForerunError

PREFIX = "FORERUN_"
OTHER_VARIABLES = (f"{PREFIX}CONFIG", f"{PREFIX}HOME")  # the file itself, and where forerun keeps what it learned
CONFIG_PANEL = "Configuration"
ACTIONS = ("dry_run", "config")  # what to do now, not how: not in the file
COMMAND_LINE, ENVIRONMENT, FILE = "COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP"  # names in typer's ParameterSource

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,  # it is read before the other flags look for their defaults
        envvar=f"{PREFIX}CONFIG",
        help="A TOML file with settings by the names of the flags.",
        rich_help_panel=CONFIG_PANEL,
    ),
]


Sources = Mapping[str, str]  # who set what: port → "--port", "FORERUN_PORT" or the name of the file; not in it: nobody


def variable(name: str) -> str:
    """`max_queue` → `FORERUN_MAX_QUEUE`."""
    return PREFIX + name.upper()


def with_sources(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--config`, a variable for every flag, and `sources` filled in."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "sources"]
    kinds = {one.name: _bare(one.annotation) for one in own if _option(one.annotation) and one.name not in ACTIONS}

    def read(context: typer.Context, file: Path | None) -> Path | None:
        if file is not None:
            context.default_map = read_config(file, kinds)
        return file

    config = copy.copy(_option(Config))
    assert config is not None
    config.callback = read
    parameters = [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(_with_variable(one) for one in own),
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, config]
        ),
    ]

    @wraps(command)
    def run(*, context: typer.Context, config: Path | None, **given: Any) -> None:
        check_variables(os.environ, kinds)
        names = {name: source.name for name in given if (source := context.get_parameter_source(name)) is not None}
        words = {COMMAND_LINE: flag_of, ENVIRONMENT: variable, FILE: lambda _: str(config)}
        set_by = {name: words[kind](name) for name, kind in names.items() if kind in words}
        command(**given, sources=set_by)

    return with_parameters(run, parameters)


def named_model(name: str | None, model: str, sources: Sources) -> tuple[str, Sources]:
    """The model's name from the argument or the flag: the argument is part of the command line, too."""
    if name is None:
        return model, sources
    if sources.get("model") == "--model" and model != name:
        raise ForerunError(f"two models are named, {name!r} and --model {model!r}: give one of them")
    return name, {**sources, "model": "command line"}


def read_config(file: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a TOML file, names and types checked against `kinds`."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForerunError(f"cannot read the config file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ForerunError(f"the config file {file} is not TOML: {error}") from error
    settings: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in kinds:
            hint = _hint(name, kinds, lambda known: known.replace("_", "-"))
            raise ForerunError(f"{file}: there is no setting {key!r}: {hint}")
        if name in settings:
            raise ForerunError(f"{file}: {key} is there twice, with - and with _: keep one of them")
        wanted = _wanted(kinds[name], value)
        if wanted is not None:
            raise ForerunError(f"{file}: {key} must be {wanted}, not {value!r}")
        settings[name] = value
    return settings


def check_variables(environment: Mapping[str, str], kinds: Mapping[str, Any]) -> None:
    """A variable of ours that sets nothing is a misspelt one."""
    known = {*map(variable, kinds), *OTHER_VARIABLES}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            setting = name.removeprefix(PREFIX).lower()
            raise ForerunError(f"there is no setting behind the variable {name}: {_hint(setting, kinds, variable)}")


def _hint(name: str, kinds: Mapping[str, Any], written: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, kinds, n=1)
    return f"did you mean {written(near[0])}?" if near else "see forerun serve --help"


def _wanted(kind: Any, value: Any) -> str | None:
    """What a value should have been; None: it is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind is int:
        return None if number and isinstance(value, int) else "a whole number"
    if kind is float:
        return None if number else "a number"
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is list:
        good = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return None if good else "a list of texts"
    return None if isinstance(value, str) else "a text in quotes"


def _with_variable(parameter: inspect.Parameter) -> inspect.Parameter:
    """The same flag, read from its variable when it is not typed."""
    option = _option(parameter.annotation)
    if option is None or parameter.name in ACTIONS:
        return parameter
    option = copy.copy(option)
    option.envvar, option.show_envvar = variable(parameter.name), False  # a line more for each would hide the help
    return parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], option])


def _option(annotation: Any) -> OptionInfo | None:
    found = [one for one in get_args(annotation)[1:] if isinstance(one, OptionInfo)]
    return found[0] if found else None


def _bare(annotation: Any) -> Any:
    """`Annotated[int | None, …]` → `int`."""
    kind = get_args(annotation)[0]
    if isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    return kind
