"""What models write when they have lost their way: numbers without end, white space without end, half characters."""

from __future__ import annotations

import json

import pytest
from families import parse, short

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
