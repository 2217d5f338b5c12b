"""What a family's tool-call reader is: letters in, calls out, nothing lost when it was no call after all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.said import Said


class Reading(Enum):
    """Where a reader is after one more letter."""

    MORE = "more"
    OVER = "over"  # no more calls here; `rest` was not used
    FAILED = "failed"  # not a call: `raw` is text, and `rest` was not used


class CallReader(Protocol):
    """Reads what follows a mark that begins calls.

    A call is told from its name and the first letters of its arguments on. What fails before that was text all along;
    a call that fails later is ended as far as it came, and the text goes on behind it.
    """

    started: bool  # a call has begun and is not ended
    raw: str  # letters taken that nothing has been said of
    rest: str  # letters to be read again as text

    def feed(self, letter: str) -> Reading: ...

    def finish(self) -> None:
        """No more text comes: say what was held back of a call that has begun. `raw` is then what is text."""
        ...


class Base:
    """Shared bookkeeping of the readers."""

    def __init__(self, said: Said, raw: str) -> None:
        self.said = said
        self.started = False
        self.raw = raw
        self.rest = ""

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

    def over(self, rest: str) -> Reading:
        """Nothing more to read; `rest` goes back."""
        self.raw, self.rest = "", rest
        return Reading.OVER

    def failed(self, letter: str) -> Reading:
        """Not a call from here on; the letter goes back."""
        self.rest = letter
        return Reading.FAILED


class EndMark:
    """The mark that closes a complete call. It may be missing: the call said itself where it ends."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen = ""
        self.raw = ""

    def feed(self, letter: str) -> Reading:
        """OVER with the mark's last letter; FAILED when something else comes."""
        if self._seen or letter not in SPACE:
            self._seen += letter
            if not self._mark.startswith(self._seen):
                return Reading.FAILED
        self.raw += letter
        return Reading.OVER if self._seen == self._mark else Reading.MORE


class Closing(Base, ABC):
    """A reader whose calls have an end mark."""

    end_mark: str

    def __init__(self, said: Said, raw: str) -> None:
        super().__init__(said, raw)
        self._closing: EndMark | None = None

    def close(self) -> Reading:
        """The call is complete; its end mark may come."""
        self._closing = EndMark(self.end_mark)
        return Reading.MORE

    def feed(self, letter: str) -> Reading:
        """Takes one letter."""
        if self._closing is None:
            return self.step(letter)
        reading = self._closing.feed(letter)
        if reading is Reading.MORE:
            return reading
        return self.over("" if reading is Reading.OVER else self._closing.raw + letter)

    @abstractmethod
    def step(self, letter: str) -> Reading:
        """Takes one letter of a call."""
