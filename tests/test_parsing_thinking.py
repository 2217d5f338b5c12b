"""Thinking told apart from text: fifty texts in each style, cut everywhere, against a twin that sees the whole text."""

from __future__ import annotations

from itertools import combinations

import pytest
from families import joined

from forerun.serve.parsing.formats import AnswerFormat, ReasoningStyle
from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.make import make_parser
from forerun.serve.parsing.pieces import Content, Piece, Reasoning
from forerun.text.chat import THINK_MARKS

# S and E stand for the marks.
TEXTS = [
    *("", " ", "\n\n", "a", "a b", " a ", "\na\n", "S", "E", "SE", "ES", "SS", "EE", "SEa", "SaE", "aS", "aE", "aSE"),
    *("SaEb", "S a E b", "S\na\nE\n\nb", "\nSaEb", " \n S a\n\nb E \n\n c\n", "SaEbSc", "SaEbScEd", "aSbEc", "a SbE c"),
    *("SaSbEc", "SSaEb", "S SaEb", "S\nS\naEb", "SaEEb", "SaE Eb", "SaESbEc", "SaE SbE c", "SaE\n\nSb", "ESaEb", "bEc"),
    *(
        "Sa\n\n",
        "Sa \n b",
        "S \n",
        "S",
        "Sa E",
        "SaE ",
        "SaE\n\n",
        "SaE\n\nb\n",
        "SéEüS🌧E日",
        "S<E>b",
        "S[E]b",
        "<Sa",
        "S</E",
    ),
    *("Sa<b>[c]</d>[/e]E<f>", "SEE", "S E S E x", "SaEb E c S d E e"),
]
# Every place inside a mark, where text may end or go on as something else.
PARTS = [0.3, 0.7, -1]


def written(text: str, style: ReasoningStyle) -> str:
    start, end = THINK_MARKS[style]
    return "".join({"S": start, "E": end}.get(letter, letter) for letter in text)


def bank(style: ReasoningStyle) -> list[str]:
    start, end = THINK_MARKS[style]
    texts = [written(text, style) for text in TEXTS]
    for part in PARTS:
        begun = start[: int(len(start) * part) if part > 0 else part]
        ended = end[: int(len(end) * part) if part > 0 else part]
        texts += [begun, f"{begun}x", f"a {begun}", f"{start}a {ended}", f"{start}a {ended}x", f"{start}{ended}{end}b"]
    return list(dict.fromkeys(texts))


def parse(style: ReasoningStyle, text: str, cuts: list[int], thinking_open: bool) -> list[Piece]:
    parser = make_parser(AnswerFormat(style), [], thinking_open=thinking_open)
    pieces: list[Piece] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.push(text[begin:end])
    return joined(pieces + parser.finish())


def twin(style: ReasoningStyle, text: str, thinking: bool) -> tuple[str, str]:
    """All thinking and all content, by looking at the whole text."""
    start, end = THINK_MARKS[style]
    thoughts, parts = [], [("content", "")]
    at_beginning = True
    while True:
        if thinking:
            text = text.lstrip(SPACE)
            text = text.removeprefix(start).lstrip(SPACE)
            thought, found, text = text.partition(end)
            thoughts.append(thought.rstrip(SPACE) if found else thought)
            parts.append(("thinking", ""))
            if not found:
                break
            thinking, at_beginning = False, True
        spaces = text[: len(text) - len(text.lstrip(SPACE))]
        if at_beginning and text[len(spaces) :].startswith(start):
            before, found, text = spaces, start, text[len(spaces) + len(start) :]
        elif style != "think":
            before, found, text = text.partition(start)
        else:
            before, found, text = text, "", ""
        parts.append(("content", before))
        if not found:
            break
        thinking = True
    return "".join(thoughts), with_spaces(parts)


def with_spaces(parts: list[tuple[str, str]]) -> str:
    """The content; white space at its ends only where no thinking is beyond it."""
    content = "".join(part for _, part in parts)
    full = [index for index, (_, part) in enumerate(parts) if part.strip(SPACE)] or [len(parts)]
    if ("thinking", "") in parts[: full[0]]:
        content = content.lstrip(SPACE)
    return content.rstrip(SPACE) if ("thinking", "") in parts[full[-1] :] else content


STYLES: list[ReasoningStyle] = ["think", "gemma4", "mistral"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("thinking_open", [False, True])
def test_thinking_and_text_are_what_the_twin_finds(style: ReasoningStyle, thinking_open: bool) -> None:
    texts = bank(style)
    assert len(texts) >= 50
    for text in texts:
        pieces = parse(style, text, [], thinking_open)
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        assert (thought, content) == twin(style, text, thinking_open), text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("thinking_open", [False, True])
def test_cuts_change_nothing(style: ReasoningStyle, thinking_open: bool) -> None:
    for text in bank(style):
        whole = parse(style, text, [], thinking_open)
        for cut in range(len(text) + 1):
            assert parse(style, text, [cut], thinking_open) == whole, (text, cut)
        for cuts in combinations(range(len(text) + 1), 2) if len(text) <= 24 else ():
            assert parse(style, text, list(cuts), thinking_open) == whole, (text, cuts)
        assert parse(style, text, list(range(len(text))), thinking_open) == whole, text
