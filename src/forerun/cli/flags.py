"""Flags: how typer gets one for every field of a dataclass, and those that several commands share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial, wraps
from typing import Annotated, Any, Literal, get_type_hints

import typer

from forerun.errors import ForerunError
from forerun.memory import wanted_memory
from forerun.options import SPECULATION

MODEL_PANEL = "Model"


def panel(name: str) -> Callable[..., Any]:
    """Makes options that --help shows under this heading; a flag has the name of its parameter unless it is given."""
    return partial(typer.Option, rich_help_panel=name)


model_option, output_option = panel(MODEL_PANEL), panel("Output")

Command = Callable[..., None]
# What is typed in another form than the field has: its type on the command line, and how to read it.
Typed = Mapping[str, tuple[Any, Callable[[Any], Any]]]

MODEL_HELP = "Folder, GGUF file, hub id, or built-in name"
ModelName = Annotated[str, model_option("--model", "-m", help=f"{MODEL_HELP}.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}.")]
OptionalModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; default: smollm2.")]
AsJson = Annotated[bool, output_option("--json", help="Print one JSON object on stdout, nothing else.")]
Quiet = Annotated[bool, output_option("--quiet", help="No progress, no statistics.")]


def with_flags(name: str, options: type, typed: Typed | None = None) -> Callable[[Command], Command]:
    """Gives a command a flag for every field of the dataclass `options` in place of its parameter `name`.

    The metadata of a field are its `topic` (the panel of --help) and its `help`, and where they differ from the usual
    its `flag`, more `flags`, and the `metavar`.
    """
    hints = get_type_hints(options)
    lists = {entry.name for entry in fields(options) if hints[entry.name] == tuple[str, ...]}
    read = {**dict.fromkeys(lists, (list[str] | None, _split)), **(typed or {})}
    kinds = hints | {known: kind for known, (kind, _) in read.items()}
    flags = [_flag(entry, kinds[entry.name]) for entry in fields(options)]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [given for one in own for given in (flags if one.name == name else [one])]

        @wraps(command)
        def run(**given: Any) -> None:
            values = {flag.name: given.pop(flag.name) for flag in flags}
            values |= {known: parse(values[known]) for known, (_, parse) in read.items()}
            command(**{name: options(**values)}, **given)

        return with_parameters(run, parameters)

    return decorate


def with_parameters(command: Command, parameters: list[inspect.Parameter]) -> Command:
    """The command as typer is to see it."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag(entry: Field[Any], kind: Any) -> inspect.Parameter:
    """What typer makes one flag of."""
    facts, plain = entry.metadata, flag_of(entry.name)
    switch = f"{plain}/--no-{plain[2:]}" if kind is bool and entry.default else plain
    default = None if entry.default == () else entry.default
    option = typer.Option(
        *(facts.get("flag", switch), *facts.get("flags", ())),
        help=facts["help"] + (" Repeatable, or with commas." if entry.default == () else ""),
        metavar=facts.get("metavar"),
        rich_help_panel=facts["topic"],
    )
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def flag_of(name: str) -> str:
    """`max_queue` → `--max-queue`."""
    return "--" + name.replace("_", "-")


def _split(texts: list[str] | None) -> tuple[str, ...]:
    """`["a,b", "c"]` → `("a", "b", "c")`."""
    return tuple(part.strip() for text in texts or () for part in text.split(",") if part.strip())


def require_positive(flag: str, value: int | None) -> None:
    """Refuse counts below one."""
    if value is not None and value < 1:
        raise ForerunError(f"{flag} {value}: give a whole number from 1 up")


def _about(default: Any, topic: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"topic": topic, "help": help, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is loaded."""

    device: str = _about("auto", MODEL_PANEL, "auto, cpu, cuda, cuda:1, mps …")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _about("auto", MODEL_PANEL, "What to compute in.")
    quantize: Literal["auto", "none", "int8"] = _about(
        "auto", MODEL_PANEL, "How to store the weights; auto: int8 on CPU, none elsewhere."
    )
    max_context: int | None = _about(None, MODEL_PANEL, "Longest prompt plus answer, in tokens; default: the model's.")
    memory: str | None = _about(
        None, MODEL_PANEL, "For the key/value cache: a share of what is free, or bytes.", metavar="0.5|6G|512M"
    )

    def check(self) -> None:
        """Refuse what cannot be meant, before a model is loaded for it."""
        require_positive("--max-context", self.max_context)
        wanted_memory(self.memory)

    def arguments(self) -> dict[str, Any]:
        """For `forerun.load`."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def given(self) -> list[str]:
        """The flags of those that are not at their default: a server, for one, has loaded its model already."""
        return [flag_of(entry.name) for entry in fields(self) if getattr(self, entry.name) != entry.default]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(ModelOptions):
    """How a model is loaded, and who drafts for it."""

    draft_model: str | None = _about(None, SPECULATION, "A smaller model with the same tokenizer, or an assistant.")
    head: str | None = _about(
        None, SPECULATION, "An MTP head for the model; default: its own, or one of forerun's.", metavar="FOLDER"
    )
    assistant_position: str = _about("n-1", SPECULATION, "Where an assistant's queries stand: n-1 or n.")
    prefix_cache: bool = _about(
        True, MODEL_PANEL, "Keep texts in the cache while there is room: beginnings that come again are not read again."
    )

    slowdown: float = _about(
        2.5,
        MODEL_PANEL,
        "Times as long that a token may take while prompts are read; more lets those begin sooner.",
    )

    def check(self, one_drafter: bool = True) -> None:
        """A benchmark may compare two drafters."""
        if not 1 < self.slowdown < math.inf:
            raise ForerunError(f"--slowdown {self.slowdown:g}: give more than 1, for example 2.5")
        if one_drafter and self.head is not None and self.draft_model is not None:
            raise ForerunError("--head and --draft-model name two drafters: drop one of them")
        if self.head == "":
            raise ForerunError("--head is empty: give the folder of an MTP head")
        ModelOptions.check(self)

    def arguments(self) -> dict[str, Any]:
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return given | {"head": "auto" if self.head is None else self.head}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingLoadOptions(LoadOptions):
    """How a model is loaded that may keep its prefix cache between runs."""

    cache: str | None = _about(
        None,
        MODEL_PANEL,
        "Keep texts in this file between runs: what an earlier run has read is not read again.",
        metavar="FILE",
    )

    def check(self, one_drafter: bool = True) -> None:
        LoadOptions.check(self, one_drafter)
        if self.cache == "":
            raise ForerunError("--cache is empty: name a file to keep the prefix cache in")
        if self.cache is not None and not self.prefix_cache:
            raise ForerunError("--cache keeps the prefix cache, and --no-prefix-cache has none: drop one of them")
