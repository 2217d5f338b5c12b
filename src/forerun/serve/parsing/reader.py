"""What a family's tool-call reader is: letters in, calls out, nothing lost when it was no call after all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.piece_collector import PieceCollector


class ReaderState(Enum):
    """Where a reader is after one more letter."""

    MORE = "more"
    OVER = "over"  # no more calls here; `rest` was not used
    FAILED = "failed"  # not a call: `raw` is text, and `rest` was not used


class CallReader(ABC):
    """Reads what follows a mark that begins calls.

    A call is told from its name and the first letters of its arguments on. What fails before that was text all along;
    a call that fails later is ended as far as it came, and the text goes on behind it.
    """

    def __init__(self, said: PieceCollector, raw: str) -> None:
        self.said = said
        self.started = False  # a call has begun and is not ended
        self.raw = raw  # letters taken that nothing has been said of
        self.rest = ""  # letters to be read again as text

    @abstractmethod
    def feed(self, letter: str) -> ReaderState:
        """Takes one letter."""

    @abstractmethod
    def finish(self) -> None:
        """No more text comes: say what was held back of a call that has begun. `raw` is then what is text."""

    def begin(self, name: str) -> None:
        """The call is certain enough to be told."""
        self.said.start(name)
        self.started, self.raw = True, ""

    def tell(self, text: str) -> None:
        """More of the arguments; whatever was taken so far is said."""
        self.said.arguments(text)
        self.raw = ""

    def end(self) -> None:
        """The call is complete."""
        self.said.end()
        self.started, self.raw = False, ""

    def over(self, rest: str) -> ReaderState:
        """Nothing more to read; `rest` goes back."""
        self.raw, self.rest = "", rest
        return ReaderState.OVER

    def failed(self, letter: str) -> ReaderState:
        """Not a call from here on; the letter goes back."""
        self.rest = letter
        return ReaderState.FAILED


class Closing(CallReader):
    """A reader whose calls have an end mark. It may be missing: a call says itself where it ends."""

    end_mark = ""  # empty: there is none

    def __init__(self, said: PieceCollector, raw: str) -> None:
        super().__init__(said, raw)
        self.complete = False  # but for its end mark
        self._behind, self._seen = "", ""  # the call: all letters, and those that may be the mark

    def close(self) -> ReaderState:
        """The call is complete; its end mark may come."""
        self.complete = True
        return ReaderState.MORE if self.end_mark else self.over("")

    def feed(self, letter: str) -> ReaderState:
        """Takes one letter."""
        if not self.complete:
            return self.step(letter)
        self._behind += letter
        if self._seen or letter not in SPACE:
            self._seen += letter
        if self._seen == self.end_mark:
            return self.over("")
        return ReaderState.MORE if self.end_mark.startswith(self._seen) else self.over(self._behind)

    @abstractmethod
    def step(self, letter: str) -> ReaderState:
        """Takes one letter of a call."""
