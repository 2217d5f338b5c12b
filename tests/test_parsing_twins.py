"""Parsers against obvious twins: calls written by plain functions come back, and JSON is what the json module takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families import FORMATS, parse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.serve.chat_job import Tool
from forerun.serve.parsing.json_text import JsonReader, Step
from forerun.serve.parsing.pieces import CallArguments, CallStart, Content, Piece

WORDS = [
    "<",
    ">",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    ":",
    ",",
    ";",
    "a",
    "é",
    "🌧",
    "</tool_call>",
    "<|",
    "|>",
]
WORDS += ["<tool_call|>", "[ARGS]", "</think>", "true", "1", "call:", "<function=x>", "\t", "\x01"]
# A text of Gemma's cannot hold what ends it.
TEXTS = st.lists(st.sampled_from(WORDS), max_size=8).map("".join).filter(lambda text: '<|"|>' not in text)
KEYS = st.sampled_from(["city", "days", "a_b", "Ключ"])
LEAVES = st.none() | st.booleans() | st.integers(-999, 999) | st.sampled_from([1.5, -0.25, 1e30]) | TEXTS
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)
CALLS = st.tuples(st.sampled_from(["get_weather", "now", "a-b"]), st.dictionaries(KEYS, VALUES, max_size=3))
PLAIN = st.sampled_from(["", "Hello there.", "One\n\ntwo", "x"])


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(gemma(one) for one in value) + "]" if isinstance(value, list) else json.dumps(value)


def coder(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The calls as a model of this family writes them."""
    objects = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if family == "llama3_json":
        return "; ".join(objects)
    if family == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    if family == "gemma4":
        return "".join(f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>" for name, arguments in calls)
    functions = []
    for name, arguments in calls:
        parameters = [f"<parameter={key}>\n{coder(value)}\n</parameter>\n" for key, value in arguments.items()]
        functions.append(f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>")
    return "\n".join(functions)


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """What says of each argument whether it is a text: Qwen3-Coder's form does not."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"properties": {key: {"type": kinds.get(type(value), "null")} for key, value in arguments.items()}}


def calls_of(pieces: list[Piece]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize("family", sorted(FORMATS))
@settings(max_examples=120, deadline=None)
@given(st.data(), PLAIN, st.lists(CALLS, min_size=1, max_size=3), PLAIN)
def test_calls_come_back_as_they_were_written(
    family: str, data: st.DataObject, before: str, calls: list[tuple[str, dict[str, Any]]], after: str
) -> None:
    if family == "llama3_json":
        before = ""  # its calls stand at the beginning
    if family == "qwen3_coder":
        calls = calls[:1]  # one schema for one tool
    tools = [Tool(calls[0][0], parameters=schema_of(calls[0][1]))]
    text = before + written(family, calls) + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = parse(family, text, cuts, tools=tools)
    assert calls_of(pieces) == calls
    # White space between calls stays where there is text on both sides of it.
    between = "\n" * (len(calls) - 1) if before and after and family == "hermes" else ""
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == before + between + after


def scanned(text: str) -> tuple[bool, str]:
    """Does the reader take the whole text as one value, and what does it make of it?"""
    reader = JsonReader()
    out = ""
    for index, letter in enumerate(text):
        step, more = reader.feed(letter)
        out += more
        if step is Step.DONE:
            return not text[index + 1 :].strip(), out
        if step is not Step.MORE:
            return False, out
    return False, out


PIECES = ["{", "}", "[", "]", ",", ":", '"', "\\", "\\n", "\\u00e9", "\\u1", " ", "a"]
PIECES += ["1", "0", "-", ".", "e", "+", "true", "null", "tr"]
MESSY = st.lists(st.sampled_from(PIECES), max_size=12).map(lambda parts: "{" + "".join(parts))


@settings(max_examples=400, deadline=None)
@given(MESSY | VALUES.map(lambda value: json.dumps({"a": value, "b": [value]}, ensure_ascii=False)))
@example('{"a": 1,}')
@example('{"a": [1, ], "b": {"c": 2 , } }')
@example('{"a": "\\d"}')
@example('{"a": True, "b": None}')
@example("{} ")
def test_json_is_what_the_json_module_takes(text: str) -> None:
    whole, out = scanned(text)
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        # More is taken than the module does, but what comes out is always JSON.
        if whole:
            assert isinstance(json.loads(out), dict)
        return
    assert whole
    assert json.loads(out) == expected
