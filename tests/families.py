"""The families of tool formats for tests: their marks, tokenizers that have them as tokens, and how to run a parser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tiny import tiny_tokenizer

from forerun.serve.chat_job import Tool
from forerun.serve.parsing.formats import AnswerFormat, detect_format
from forerun.serve.parsing.make import make_parser
from forerun.serve.parsing.pieces import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning

# What each family's tokenizers have as added tokens, and whether these are special.
MARKS: dict[str, tuple[Sequence[str], bool]] = {
    "hermes": (("<think>", "</think>", "<tool_call>", "</tool_call>"), False),
    "qwen3_coder": (("<think>", "</think>", "<tool_call>", "</tool_call>"), False),
    "gemma4": (("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'), True),
    "llama3_json": (("<|python_tag|>",), True),
    "mistral": (("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), True),
}
REASONING = {"gemma4": "gemma4", "mistral": "mistral"}
FORMATS = {name: AnswerFormat(REASONING.get(name, "think"), name) for name in MARKS}  # type: ignore[arg-type]

TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "exact": {"type": "boolean"},
            },
            "required": ["city"],
        },
    ),
    Tool(
        "write",
        parameters={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object"},
                "mode": {"type": ["string", "null"]},
                "ratio": {"type": "number"},
                "any": {},
            },
        },
    ),
    Tool("now"),
]


def family_tokenizer(name: str) -> Any:
    """A byte-level tokenizer with the family's marks."""
    from tokenizers import AddedToken

    marks, special = MARKS[name]
    tokenizer = tiny_tokenizer()
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    (tokenizer.backend_tokenizer.add_special_tokens if special else tokenizer.backend_tokenizer.add_tokens)(added)
    return tokenizer


@lru_cache(maxsize=16)
def family_format(name: str) -> AnswerFormat:
    """The format with the ids of the family's tokenizer."""
    added = family_tokenizer(name).backend_tokenizer.get_added_tokens_decoder()
    ids = {token.content: index for index, token in added.items()}
    special = {token.content for token in added.values() if token.special}
    found = detect_format("", ids, special, tool_parser=name, reasoning_parser=FORMATS[name].reasoning)
    return replace(found)


def parse(
    name: str,
    text: str,
    cuts: Iterable[int] = (),
    *,
    thinking_open: bool = False,
    tools: Sequence[Tool] = TOOLS,
    enabled: bool = True,
) -> list[Piece]:
    """The pieces of a text that came cut at these places, adjacent ones of a kind joined."""
    parser = make_parser(FORMATS[name], tools if enabled else (), thinking_open=thinking_open)
    pieces: list[Piece] = []
    before = 0
    for cut in [*cuts, len(text)]:
        pieces += parser.push(text[before:cut])
        before = cut
    return joined(pieces + parser.finish())


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Adjacent pieces of one kind become one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(last.text + piece.text)
        else:
            result.append(piece)
    return result


Short = list[str | tuple[str, str]]


def short(pieces: Iterable[Piece]) -> Short:
    """Pieces in a form that is quick to write: "t text", "r reasoning", ("name", "arguments")."""
    result: Short = []
    for piece in pieces:
        if isinstance(piece, Content):
            result.append(f"t {piece.text}")
        elif isinstance(piece, Reasoning):
            result.append(f"r {piece.text}")
        elif isinstance(piece, CallStart):
            result.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, _ = result[-1]
            result[-1] = (name, piece.text)
        else:
            assert isinstance(piece, CallEnd)
            assert isinstance(result[-1], tuple)
    return result
