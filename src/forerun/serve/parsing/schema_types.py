"""Which JSON types a tool's schema allows for an argument that a model wrote as bare text, and the text as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.errors import ForerunError
from forerun.serve.parsing.json_text import SPACE, parse_json

ANY = frozenset({"string", "number", "boolean", "null", "object", "array"})
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # Python's spelling as well
_DEEPEST = 16


def types_of(
    schema: Any, root: Mapping[str, Any], depth: int = 0, known: dict[str, frozenset[str]] | None = None
) -> frozenset[str]:
    """JSON types that the schema allows (an integer is a number); all of them where it does not say.

    `known`: what references were found to allow. Each is followed once: they may lead to each other in many ways.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return ANY
    if "$ref" in schema:
        place = str(schema["$ref"])
        if place not in known:
            known[place] = ANY  # for a reference to itself
            known[place] = types_of(resolve(place, root), root, depth + 1, known)
        return known[place]
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset("number" if name == "integer" else str(name) for name in named) & ANY or ANY
    if known_values(schema):
        return frozenset(_type_of(value) for value in known_values(schema))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            return frozenset().union(*(types_of(one, root, depth + 1, known) for one in schema[word]))
    if isinstance(schema.get("allOf"), list):
        allowed = ANY
        for one in schema["allOf"]:
            allowed &= types_of(one, root, depth + 1, known)
        return allowed or ANY
    return ANY


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of an object's keys. `ForerunError` for what is none."""
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise ForerunError("'properties' in the schema of a tool must be an object")
    return properties


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keys that an object must have. `ForerunError` for what is none."""
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ForerunError("'required' in the schema of a tool must be a list of names")
    return frozenset(required)


def parameter_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Types of one argument; a text if the tool does not know it."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return types_of(properties[name], parameters)
    return frozenset({"string"})


def value_as_json(text: str, types: frozenset[str]) -> str:
    """The text as JSON of an allowed type if it is one, else as a JSON text."""
    bare = text.strip(SPACE)
    word = _WORDS.get(bare.lower())
    if word is not None and _type_of(parse_json(word)) in types:
        return word
    try:
        value = parse_json(bare)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    return bare if kind in types and kind != "string" else json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def known_values(schema: Any) -> list[Any]:
    """The values that a schema lists; none if it does not list them."""
    if not isinstance(schema, Mapping):
        return []
    listed = schema.get("enum")
    if isinstance(listed, list):
        return listed
    return [schema["const"]] if "const" in schema else []


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a `$ref` inside the schema points to; None if nothing."""
    place: Any = root
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").split("/")[1:]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
