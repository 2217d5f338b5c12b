"""What a parser makes of an answer's text: reasoning, content and tool calls, in the order they were said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; what follows up to the next `CallEnd` belongs to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of its arguments: joined they are one JSON object, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The tool call is complete."""


Piece = Reasoning | Content | CallStart | CallArguments | CallEnd


class AnswerParser(Protocol):
    """One answer. Joined pieces of the same kind are the same for every way to cut the text."""

    def push(self, text: str) -> list[Piece]:
        """All that is certain after this text."""
        ...

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, now that no more text comes. An unfinished tool call is ended as far as it came.

        `cut`: a limit ended the text, so that a call may have begun that nothing was told of. It is no text.
        """
        ...


class PlainText:
    """The parser of text completions: everything is content."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Piece]:  # noqa: ARG002 - nothing is held back
        return []
