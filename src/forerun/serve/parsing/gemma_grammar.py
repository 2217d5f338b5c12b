"""Gemma 4's own way to write arguments, as a grammar made from a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from forerun.serve.parsing.grammar_rules import Rules, quoted
from forerun.serve.parsing.schema_types import known_values, properties_of, required_of, resolve, types_of

_QUOTE = '<|"|>'
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/"
_INTEGER = r"/-?(0|[1-9][0-9]*)/"
_BARE_KEY = re.compile(r"[^\s{}\[\],<>\":][^{}\[\],<>\":\n]*")


def gemma_arguments(rules: Rules, schema: Mapping[str, Any]) -> str:
    """The expression of an object of this schema."""
    return _Values(rules, schema).value(schema)


class _Values:
    def __init__(self, rules: Rules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        self._references: dict[str, str] = {}  # where it points → its rule

    def value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        for word in ("anyOf", "oneOf"):
            if schema.get(word) and isinstance(schema[word], list):
                return self._one_of([self.value(one) for one in schema[word]])
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            return self.value(schema["allOf"][0])
        known = known_values(schema)
        if known:
            return self._one_of([self._literal(one) for one in known])
        return self._one_of([self._typed(kind, schema) for kind in sorted(types_of(schema, self._root))])

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._text()
        if kind == "number":
            return self._rules.rule(_INTEGER if schema.get("type") == "integer" else _NUMBER)
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        if kind == "array":
            item = self.value(schema.get("items"))
            return self._rules.rule(f'"[" ({item} ("," {item})*)? "]"')
        return self._object(schema)

    def _text(self) -> str:
        quote = self._rules.mark(_QUOTE)
        if self._rules.is_token(_QUOTE):
            return self._rules.rule(f"{quote} /(.|\\n)*/ {quote}")
        return self._rules.rule(f"{quote} {self._rules.text_until(_QUOTE)}")

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            quote = self._rules.mark(_QUOTE)
            return f"({quote} {quoted(value)} {quote})" if value else f"({quote} {quote})"
        if isinstance(value, dict | list):
            return self._anything()
        return quoted(json.dumps(value))

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = properties_of(schema), required_of(schema)
        if not properties:
            closed = schema.get("additionalProperties") is False
            return '"{}"' if closed else self._free_object()
        pairs = {key: f"{_key(key)} {self.value(one)}" for key, one in properties.items()}
        musts = [pairs[key] for key in properties if key in required]
        mays = [pairs[key] for key in properties if key not in required]
        if musts:
            together = ' "," '.join(musts) + "".join(f' ("," {pair})?' for pair in mays)
            return self._rules.rule(f'"{{" {together} "}}"')
        return self._rules.rule(f'"{{" {self._some_of(mays)}? "}}"')

    def _some_of(self, pairs: list[str]) -> str:
        """At least one of them, in their order."""
        first = later = ""
        for pair in reversed(pairs):
            begun = f"{pair} {later}".strip()
            first = self._rules.rule(f"({begun}) | {first}" if first else begun)
            later = self._rules.rule(f'("," {pair})? {later}'.strip())
        return first

    def _reference(self, place: str) -> str:
        if place not in self._references:
            name = self._references[place] = self._rules.reserve()
            self._rules.add(name, self.value(resolve(place, self._root)))
        return self._references[place]

    def _anything(self) -> str:
        name = "any_value"
        if name not in self._references:
            self._references[name] = name
            kinds = [self._text(), self._rules.rule(_NUMBER), '"true"', '"false"', '"null"', self._free_object()]
            kinds.append(self._rules.rule(f'"[" ({name} ("," {name})*)? "]"'))
            self._rules.add(name, self._one_of(kinds))
        return name

    def _free_object(self) -> str:
        value = self._anything()
        pair = self._rules.rule(f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {value}')
        return self._rules.rule(f'"{{" ({pair} ("," {pair})*)? "}}"')

    def _one_of(self, expressions: list[str]) -> str:
        return expressions[0] if len(expressions) == 1 else "(" + " | ".join(expressions) + ")"


def _key(name: str) -> str:
    bare = _BARE_KEY.fullmatch(name) and name == name.strip()
    return quoted((name if bare else json.dumps(name, ensure_ascii=False)) + ":")
