"""A Lark grammar in the making: rules with names of their own, marks as tokens, JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.sample.grammar import JSON_STYLE
from forerun.sample.schema_formats import with_lengths

_FOR_READERS = ("description", "title", "examples", "default", "deprecated", "$comment", "$schema", "$id")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # names, which may be any word, → schemas
_VALUES = ("enum", "const", "required")


class Rules:
    """Collects rules; equal ones are made once."""

    def __init__(self, mark_ids: Mapping[str, int]) -> None:
        self._mark_ids = mark_ids
        self._rules: dict[str, str] = {}  # name → what it is
        self._names: dict[str, str] = {}  # what it is → name

    def add(self, name: str, body: str) -> str:
        """A rule with a name that is given."""
        self._rules[name] = body
        return name.partition("[")[0]

    def choice(self, name: str, bodies: Sequence[str]) -> str:
        """One of several."""
        return self.add(name, " | ".join(f"({body})" if " " in body else body for body in bodies))

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule with a name of its own."""
        key = attributes + body
        if key not in self._names:
            self._names[key] = f"r{len(self._names)}"
            self.add(self._names[key] + attributes, body)
        return self._names[key]

    def reserve(self) -> str:
        """A name for a rule that is added later, so that it can speak of itself."""
        name = f"r{len(self._names)}"
        self._names[f"reserved {name}"] = name
        return name

    def mark(self, text: str) -> str:
        """A mark: the token where it is one, else its letters."""
        return f"<[{self._mark_ids[text]}]>" if text in self._mark_ids else quoted(text)

    def is_token(self, text: str) -> bool:
        """Is the mark a token of its own?"""
        return text in self._mark_ids

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """A value of a JSON schema. Words that llguidance does not know are errors for strict tools only."""
        styled = {**with_lengths(_bare(schema)), "x-guidance": {**JSON_STYLE, "lenient": not strict}}
        return self.rule("%json " + json.dumps(styled, ensure_ascii=False))

    def text_until(self, end: str) -> str:
        """Any text, up to and with this end."""
        return self.rule(r"/(.|\n)*/", f"[suffix={quoted(end)}]")

    def text(self) -> str:
        """The whole grammar, the start first."""
        first = {name: body for name, body in self._rules.items() if name == "start"}
        return "".join(f"{name}: {body}\n" for name, body in (first | self._rules).items())


def quoted(text: str) -> str:
    """A text as grammars spell it."""
    return json.dumps(text, ensure_ascii=False)


def _bare(schema: Any) -> Any:
    """The schema without words for readers: they make most of the length of tools that agents send."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _FOR_READERS:
            continue
        if word in _NAMED and isinstance(value, Mapping):
            bare[word] = {name: _bare(one) for name, one in value.items()}
        else:
            bare[word] = value if word in _VALUES else _bare(value)
    return bare
