"""What a family's tool-call reader is: letters in, calls out, nothing lost when it was no call after all."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from forerun.serve.parsing.said import Said


class Reading(Enum):
    """Where a reader is after one more letter."""

    MORE = "more"
    OVER = "over"  # no more calls here; `rest` was not used
    FAILED = "failed"  # not a call: `raw` is text, and `rest` was not used


class CallReader(Protocol):
    """Reads what follows a mark that begins calls. It begins a call with its name and the start of its arguments."""

    started: bool  # a call has begun and is not ended
    raw: str  # letters taken that nothing has been said of
    rest: str  # letters to be read again as text

    def feed(self, letter: str) -> Reading: ...

    def finish(self) -> None:
        """No more text comes: say what was held back of a call that has begun. `raw` is then what is text."""
        ...


class Base:
    """Shared bookkeeping of the readers."""

    def __init__(self, said: Said, mark: str) -> None:
        self.said = said
        self.started = False
        self.raw = mark
        self.rest = ""

    def begin(self, name: str) -> None:
        """The call is certain enough to be told."""
        self.said.start(name)
        self.started, self.raw = True, ""

    def end(self) -> None:
        """The call is complete."""
        self.said.end()
        self.started, self.raw = False, ""

    def over(self, rest: str) -> Reading:
        """Nothing more to read; `rest` goes back."""
        self.raw, self.rest = "", rest
        return Reading.OVER

    def failed(self, letter: str) -> Reading:
        """Not a call from here on; the letter goes back."""
        self.rest = letter
        return Reading.FAILED

    def finish(self) -> None:
        """Nothing is held back."""
