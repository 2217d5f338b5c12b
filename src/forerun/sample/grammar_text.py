"""What a request may give as the form of its answer: checked before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import ForerunError

OutputKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """llguidance has limits of its own on what a grammar grows into; these are on what is sent."""

    characters: int = 64 << 10  # of a schema, expression, grammar, or of all choices
    depth: int = 64  # of objects and lists in a schema, each in the other
    choices: int = 4096


DEFAULT_LIMITS = GrammarLimits()


def check_output(kind: OutputKind, value: Any, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Refuse what has the wrong type, or is too long or too deep."""
    if kind == "json_schema":
        _check_schema(value, limits)
    elif kind == "choice":
        _check_choices(value, limits)
    elif kind in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            raise ForerunError(f"a {kind} must be a text that is not empty")
        _check_length(len(value), limits, f"the {kind}")


def _check_schema(value: Any, limits: GrammarLimits) -> None:
    if isinstance(value, str):
        _check_length(len(value), limits, "the JSON schema")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ForerunError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise ForerunError("a JSON schema must be an object or a boolean")
    level = _inside([value])  # one level after another, so that none can be too deep to look at
    for _ in range(limits.depth):
        level = _inside(level)
    if level:
        raise ForerunError(f"the JSON schema is nested more than {limits.depth} deep: simplify it, or use $defs")
    try:
        length = len(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ForerunError(f"the JSON schema is not JSON: {error}") from None
    _check_length(length, limits, "the JSON schema")


def _inside(values: list[Any]) -> list[Any]:
    """Objects and lists that are directly in these."""
    parts = [value.values() if isinstance(value, Mapping) else value for value in values if not isinstance(value, bool)]
    return [inner for part in parts for inner in part if isinstance(inner, (Mapping, list, tuple))]


def _check_choices(value: Any, limits: GrammarLimits) -> None:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, str) and one for one in value):
        raise ForerunError("choices must be a list of texts, at least one and none of them empty")
    if len(value) > limits.choices:
        raise ForerunError(f"there are {len(value)} choices and at most {limits.choices} are taken")
    _check_length(sum(map(len, value)), limits, "the list of choices")


def _check_length(length: int, limits: GrammarLimits, what: str) -> None:
    if length > limits.characters:
        raise ForerunError(f"{what} has {length} characters and at most {limits.characters} are taken")
