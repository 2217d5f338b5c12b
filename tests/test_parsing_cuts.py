"""Every text of the banks says the same however it is cut: nowhere, at one place, at two, at many, at every letter.

The texts of the banks (`parsing_texts`) were written by hand. What each one says was recorded from the parsers, read
through and corrected: "t ..." is text for the user, "r ..." is thinking, and [name, arguments] is a call. So these
tests tell whether cuts matter and whether anything changed; that calls are read right is tested where they are made.
"""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from families import FORMATS, TOOLS, parse, short

from forerun.serve.parsing.make import make_parser
from forerun.serve.parsing.pieces import CallArguments, CallEnd, CallStart, Content

FAMILIES = sorted(FORMATS)
BANKS = {
    name: json.loads((Path(__file__).parent / f"parsing_texts/{name}.json").read_text(encoding="utf-8"))
    for name in FAMILIES
}
SHORT = 34  # letters: all pairs of cuts are tried


def says(pieces: Any) -> list[Any]:
    return [list(piece) if isinstance(piece, tuple) else piece for piece in short(pieces)]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_text_says_what_the_bank_tells(name: str) -> None:
    assert len({text for text, _ in BANKS[name]}) == len(BANKS[name]) >= 50
    for text, expected in BANKS[name]:
        assert says(parse(name, text)) == expected, text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thinking_open", [False, True])
def test_one_cut_many_cuts_and_every_letter_alone_change_nothing(name: str, thinking_open: bool) -> None:
    dice = random.Random(7)
    for text, _ in BANKS[name]:
        whole = parse(name, text, thinking_open=thinking_open)
        for cut in range(len(text) + 1) if not thinking_open else ():
            assert parse(name, text, [cut]) == whole, (text, cut)
        assert parse(name, text, range(len(text)), thinking_open=thinking_open) == whole, text
        for _ in range(6):
            cuts = sorted(dice.choices(range(len(text) + 1), k=dice.randint(2, 12)))
            assert parse(name, text, cuts, thinking_open=thinking_open) == whole, (text, cuts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_a_limit_cut_is_never_text(name: str) -> None:
    """However little of it came: even the first letters of a mark that is no token of its own."""
    whole = next(text for text, said in BANKS[name] if [type(one) for one in said] == [list])
    for end in range(1, len(whole)):
        parser = make_parser(FORMATS[name], TOOLS, thinking_open=False)
        pieces = parser.push(whole[:end]) + parser.finish(cut=True)
        assert not any(isinstance(piece, Content) for piece in pieces), whole[:end]
    parser = make_parser(FORMATS[name], TOOLS, thinking_open=False)
    assert parser.push("It is 7") + parser.finish(cut=True) == [Content("It is 7")]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_cuts_of_short_texts_change_nothing(name: str) -> None:
    tried = 0
    for text, _ in BANKS[name]:
        if len(text) <= SHORT:
            whole = parse(name, text)
            for cuts in combinations(range(len(text) + 1), 2):
                assert parse(name, text, cuts) == whole, (text, cuts)
            tried += 1
    assert tried >= 10


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_may_end_anywhere(name: str) -> None:
    """Calls begin with a name, go on with arguments and end once."""
    for text, _ in BANKS[name]:
        for end in range(0, len(text), 3):
            parser = make_parser(FORMATS[name], TOOLS, thinking_open=False)
            open_call = False
            for piece in parser.push(text[:end]) + parser.finish():
                if isinstance(piece, CallStart):
                    assert piece.name
                    assert not open_call
                    open_call = True
                elif isinstance(piece, CallArguments | CallEnd):
                    assert open_call
                    open_call = isinstance(piece, CallArguments)
                else:
                    assert not open_call
            assert not open_call


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_everything_is_text(name: str) -> None:
    for text, expected in BANKS[name]:
        if any(part.startswith("r ") for part in expected if isinstance(part, str)):
            continue
        for pieces in (parse(name, text, enabled=False), parse(name, text, tools=[])):
            assert says(pieces) in ([f"t {text}"], []) or "<think>" in text or "[THINK]" in text or "<|channel>" in text


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_go_out_as_they_come(name: str) -> None:
    """A long text in an argument is not held back until it is over."""
    heads = {
        "hermes": '<tool_call>{"name": "write", "arguments": {"path": "',
        "qwen3_coder": "<tool_call><function=write><parameter=path>",
        "gemma4": '<|tool_call>call:write{path:<|"|>',
        "llama3_json": '{"name": "write", "parameters": {"path": "',
        "mistral": '[TOOL_CALLS]write[ARGS]{"path": "',
    }
    parser = make_parser(FORMATS[name], TOOLS, thinking_open=False)
    assert parser.push(heads[name])[0] == CallStart("write")
    for letter in "a long text, and more of it":
        assert parser.push(letter) == [CallArguments(letter)]


@pytest.mark.parametrize("name", FAMILIES)
def test_text_and_thinking_go_out_as_they_come(name: str) -> None:
    parser = make_parser(FORMATS[name], TOOLS, thinking_open=True)
    end = {"gemma4": "<channel|>", "mistral": "[/THINK]"}.get(name, "</think>")
    assert says(parser.push("I think")) == ["r I think"]
    assert says(parser.push(f" so.\n{end}\n\nHel")) == ["r  so.", "t Hel"]
    assert says(parser.push("lo ")) == ["t lo"]
    assert says(parser.push("you")) == ["t  you"]
    assert parser.finish() == []


def test_a_long_answer_takes_time_in_proportion() -> None:
    """Half a million letters of arguments, text and open marks in single pushes: seconds, not hours."""
    long = "x" * 200_000
    for text in (
        '<tool_call>{"name": "write", "arguments": {"path": "' + long + '"}}</tool_call>',
        "<tool_call>" * 20_000,
        "<" * 200_000,
        " " * 200_000 + "x",
    ):
        pieces = parse("hermes", text)
        assert len(pieces) in (1, 3)
