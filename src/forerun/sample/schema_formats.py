"""Texts of a JSON schema's formats get the length that the formats themselves have.

The expressions for them have no bound, and a small model that has begun to repeat itself never leaves one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NANOSECONDS = len("12:34:56.123456789+00:00")
LONGEST = {
    "email": 254,  # RFC 5321: a path has 256 characters, with its brackets
    "hostname": 253,  # RFC 1035: 255 bytes, with the length of each part
    "time": NANOSECONDS,
    "date-time": len("2000-01-01T") + NANOSECONDS,
}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # any word → a schema
_VALUES = ("enum", "const", "default", "examples", "required")


def with_lengths(schema: Any) -> Any:
    """The same schema, with `maxLength` beside those formats where none that is shorter is given."""
    if isinstance(schema, list):
        return [with_lengths(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    bounded: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _NAMED and isinstance(value, Mapping):
            bounded[word] = {name: with_lengths(one) for name, one in value.items()}
        else:
            bounded[word] = value if word in _VALUES else with_lengths(value)
    name = schema.get("format")
    longest = LONGEST.get(name) if isinstance(name, str) else None
    if longest is not None and not _is_more(schema.get("minLength"), longest):
        given = schema.get("maxLength", longest)
        bounded["maxLength"] = longest if _is_more(given, longest) else given
    return bounded


def _is_more(number: Any, than: int) -> bool:
    return isinstance(number, int | float) and number > than
