"""Chat templates: programs that a model brings along, rendered in jinja's immutable sandbox under limits.

A render ends with an error when its time is over or its text too long. Jinja cannot be interrupted from outside, so the
template looks at the clock itself: whenever it reads an attribute or an item, calls something, multiplies, or writes
text. All that a request can make long (messages, tools, contents) passes through one of these. A template written to
hang without doing any of them (nested loops over the letters of one text, a filter with a huge argument) can still go
on: run renders in a worker thread and stop waiting for it a little after the limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from forerun.errors import ForerunError

SECONDS = 5.0
LONGEST = 1 << 26  # characters of a rendered prompt
_MOST_REPEATS = 1 << 20  # of a text or list by `*`, and the largest exponent's result in bits


class RenderLimit(TemplateError):
    """A template ran out of time or wrote too much."""


class _Watch(threading.local):
    """The end of the render under way in this thread; a render that nobody waits for any more ends itself too."""

    end: float | None = None

    def check(self) -> None:
        if self.end is not None and time.monotonic() > self.end:
            raise RenderLimit("it took too long")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with the names that chat templates expect, looking at the clock."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.watch = _Watch()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _PlainNamespace
        self.globals["dict"] = _make_dict  # a function has less to reach through than a class

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.watch.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.watch.check()
        return super().getitem(obj, argument)

    # The names are jinja's: a call's own keyword arguments must not meet these.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.watch.check()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.watch.check()
        if operator == "*" and _repeats(left, right) > _MOST_REPEATS:
            raise RenderLimit("it repeats a text too often")
        if operator == "**" and _power_bits(left, right) > _MOST_REPEATS:
            raise RenderLimit("it computes a number that is too large")
        return super().call_binop(context, operator, left, right)


class _PlainNamespace(Namespace):
    """`namespace(...)` without names that Python itself gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training: here what is inside is simply written."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A template with the special tokens of its tokenizer."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self.source = source
        self._special = dict(special_tokens)
        try:
            self._sandbox, self._compiled, self.variables = _compiled(source)
        except (TemplateError, RecursionError) as error:
            raise _failure(error) from error

    def options(self) -> frozenset[str]:
        """Names that it reads and that the caller may set."""
        return self.variables - RESERVED - self._special.keys() - self._sandbox.globals.keys()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        new_turn: bool = True,
        seconds: float = SECONDS,
    ) -> str:
        """The prompt as text. What goes wrong is a `ForerunError` of one line."""
        watch, written = self._sandbox.watch, 0
        watch.end = time.monotonic() + seconds
        values = {**self._special, **(options or {})}
        values |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": new_turn}
        pieces = []
        try:
            for piece in self._compiled.generate(values):
                watch.check()
                written += len(piece)
                if written > LONGEST:
                    raise RenderLimit("it writes too much")
                pieces.append(piece)
        # A template is a program of the model's: besides jinja's own errors it can fail like any Python expression.
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise _failure(error) from error
        finally:
            watch.end = None
        return "".join(pieces)


def read_template(file: Path) -> str:
    """A chat template of the user's own."""
    try:
        source = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ForerunError(f"cannot read the chat template {file}: {reason}") from error
    try:
        _compiled(source)
    except (TemplateError, RecursionError) as error:
        raise ForerunError(f"the chat template {file} is no Jinja template: {' '.join(str(error).split())}") from error
    return source


# What a caller's options must not touch: inputs of the template, and parameters of functions that render templates.
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("sanitize_control_tokens", "self", "loop", "caller", "varargs", "kwargs"),
    }
)
MAX_OPTIONS = 32
MAX_OPTION_LENGTH = 1000


def check_options(options: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """`chat_template_kwargs` of a request: few, short, plain values that the template really reads."""
    if len(options) > MAX_OPTIONS:
        raise ForerunError(f"{len(options)} template options were given; use at most {MAX_OPTIONS}")
    known = template.options()
    for name, value in options.items():
        if not isinstance(name, str) or name in RESERVED or name.startswith(("_", "return_")):
            raise ForerunError(f"the template option {str(name)[:60]!r} cannot be set")
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ForerunError(f"the model's chat template has no option {name[:60]!r}; it has: {listed}")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ForerunError(f"the template option {name!r} must be text, a number, true, false or null")
        too_long = isinstance(value, str) and len(value) > MAX_OPTION_LENGTH
        if too_long or (isinstance(value, int) and value.bit_length() > 64):
            raise ForerunError(f"the template option {name!r} is too long; use at most {MAX_OPTION_LENGTH} characters")
    return dict(options)


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[_Sandbox, Any, frozenset[str]]:
    sandbox = _Sandbox()
    return sandbox, sandbox.from_string(source), frozenset(meta.find_undeclared_variables(sandbox.parse(source)))


def _failure(error: Exception) -> ForerunError:
    detail = " ".join(str(error).split())[:500] or type(error).__name__
    return ForerunError(f"the model's chat template cannot render these messages: {detail}")


def _repeats(left: Any, right: Any) -> int:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            return max(1, len(many)) * times
    return 0


def _power_bits(left: Any, right: Any) -> int:
    return left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse_underscore(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
