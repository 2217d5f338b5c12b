"""What models write when they have lost their way: numbers without end, white space without end, half characters.

And schemas that lead nowhere.
"""

from __future__ import annotations

import itertools
import json
import time

import pytest
from families import parse, short

from forerun.serve.parsing.schema_types import types_of

LONG = 60_000  # letters: what takes time by their square takes many seconds
DIGITS = "1" * 5000  # more than Python turns into a number


def test_a_number_of_any_length_is_an_argument() -> None:
    arguments = f'{{"a": {DIGITS}}}'
    text = f'<tool_call>{{"name": "now", "id": {DIGITS}, "arguments": {arguments}}}</tool_call>'
    assert short(parse("hermes", text)) == [("now", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        f'{{"name": "now", "arguments": {DIGITS}}}',
        f'{{"name": {DIGITS}, "arguments": {{}}}}',
        f'{{"arguments": {{"a": {DIGITS}}}, "name": "now"}}',
        f'{{"name": "now", "arguments": "{{\\"a\\": {DIGITS}}}"}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
    ],
    ids=[
        "arguments",
        "name",
        "arguments first",
        "arguments as text",
        "half a character as name",
        "half a character in text",
    ],
)
def test_what_can_be_no_call_is_text(text: str) -> None:
    whole = f"<tool_call>{text}</tool_call>"
    assert short(parse("hermes", whole)) == [f"t {whole}"]


def test_half_a_character_in_an_argument_stays_as_json_spells_it() -> None:
    [(name, arguments)] = short(
        parse("hermes", '<tool_call>{"\\ud800": 1, "name": "now", "arguments": {"a": "\\ud800"}}')
    )
    assert (name, arguments) == ("now", '{"a": "\\ud800"}')
    assert json.loads(arguments) == {"a": "\ud800"}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "a" + " " * LONG + "b"),
        ("hermes", "<think>a" + "\n" * LONG + "b</think>c"),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + " " * LONG + '{"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {' + " " * LONG + '"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "' + " " * LONG + '{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "1" * LONG + "}}</tool_call>"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{" + " " * LONG + "}"),
    ],
    ids=["text", "thinking", "before arguments", "in arguments", "arguments as text", "number", "mistral"],
)
def test_white_space_and_digits_without_end_take_time_in_proportion(family: str, text: str) -> None:
    """They come letter by letter, and the event loop that reads them has other answers to read."""
    begun = time.thread_time()
    cut = parse(family, text, range(len(text)))
    assert time.thread_time() - begun < 2.5
    assert cut == parse(family, text)
    assert len(cut) == (1 if text[0] == "a" else 2 if "think" in text else 3)


def test_references_that_lead_to_each_other_are_followed_once() -> None:
    """Seven ways at each of seven places are nearly a million ways in all; a call's arguments are read meanwhile."""
    names = [f"n{number}" for number in range(8)]
    inner = {name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 7} for name, after in itertools.pairwise(names)}
    root = {"$defs": {**inner, "n7": {"type": ["integer", "null"]}}}
    begun = time.thread_time()
    assert types_of({"$ref": "#/$defs/n0"}, root) == {"number", "null"}
    assert types_of({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n7"}]}, root) == {"string", "number", "null"}
    assert time.thread_time() - begun < 1
