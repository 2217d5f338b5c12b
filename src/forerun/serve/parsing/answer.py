"""The parser of an answer: thinking, text and tool calls, told apart letter by letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.pieces import Piece
from forerun.serve.parsing.reader import CallReader, ReaderState

MakeReader = Callable[[PieceCollector, str], CallReader]


class TaggedParser:
    """Marks begin thinking and calls; what they mean depends on the text so far, never on how it was cut.

    Thinking begins where the answer does (`think_anywhere`: wherever its mark stands) and ends with its end mark;
    calls inside it are thoughts. A call is handed to the family's reader until that says it is over. What was no call
    after all is text as it was.
    """

    def __init__(
        self,
        *,
        think: tuple[str, str] | None,
        think_anywhere: bool = False,
        thinking_open: bool = False,
        marks: Sequence[str] = (),
        first_marks: Sequence[str] = (),
        make_reader: MakeReader | None = None,
    ) -> None:
        """`first_marks`: what begins calls only where the answer's text begins."""
        self._said = PieceCollector(hold_spaces=make_reader is not None or think is not None)
        self._think, self._anywhere = think, think_anywhere
        self._marks, self._first_marks, self._make_reader = tuple(marks), tuple(first_marks), make_reader
        self._buffer = ""
        self._first = True  # nothing but white space so far, thinking aside
        self._reader: CallReader | None = None
        self._mark = ""  # what the reader was called for
        self._state = "thinking begins" if thinking_open and think else "text"

    def push(self, text: str) -> list[Piece]:
        """All that is certain after this text."""
        self._buffer += text
        self._drain()
        return self._said.take()

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back."""
        if self._reader is not None:
            self._reader.finish()
            raw = self._reader.raw
            if self._reader.started:
                self._said.end()
            self._reader = None
            self._said.content("" if cut else raw)
        held, self._buffer = self._buffer, ""
        if self._state == "text":
            begun = any(mark.startswith(held) for mark in self._marks)
            self._said.content("" if cut and begun else held)
        else:
            self._said.reasoning(held if self._state == "thinking" else held.lstrip(SPACE))
        self._said.finish()
        return self._said.take()

    def _drain(self) -> None:
        """Until nothing more is certain."""
        while self._buffer and self._step():
            pass

    def _step(self) -> bool:
        """Uses some of the buffer; False: it must wait for more."""
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._state == "text":
            return self._read_text()
        return self._read_thinking() if self._state == "thinking" else self._begin_thinking()

    def _read_call(self, reader: CallReader) -> bool:
        for index, letter in enumerate(self._buffer):
            reading = reader.feed(letter)
            if reading is ReaderState.MORE:
                continue
            self._reader = None
            again = reader.rest
            if reading is ReaderState.FAILED:
                if reader.started:
                    self._said.end()
                # The mark was text. What came after it is read again: it may have a mark in it.
                text = self._mark if reader.raw.startswith(self._mark) else reader.raw
                self._said.content(text)
                again = reader.raw[len(text) :] + again
            self._buffer = again + self._buffer[index + 1 :]
            return True
        self._buffer = ""
        return False

    def _read_text(self) -> bool:
        if self._first:
            text = self._buffer.lstrip(SPACE)
            self._said.content(self._buffer[: len(self._buffer) - len(text)])
            self._buffer = text
            if not text:
                return False
        found = _find(self._buffer, self._marks_here())
        if self._first and (found is None or found[0] > 0):
            self._first = False
            return True  # once more, without the marks that only stand at the beginning
        if found is None:
            self._said.content(self._buffer)
            self._buffer = ""
            return False
        start, mark = found
        self._said.content(self._buffer[:start])
        self._buffer = self._buffer[start:]
        if mark is None:
            return False
        self._buffer = self._buffer[len(mark) :]
        self._first = False
        if self._think is not None and mark == self._think[0]:
            self._state = "thinking begins"
        elif self._make_reader is not None:
            self._mark, self._reader = mark, self._make_reader(self._said, mark)
        return True

    def _marks_here(self) -> tuple[str, ...]:
        marks = self._marks
        if self._first:
            marks += self._first_marks
        if self._think is not None and (self._first or self._anywhere):
            marks += (self._think[0],)
        return marks

    def _begin_thinking(self) -> bool:
        """White space, and a mark that says once more what was said already, are left out."""
        assert self._think is not None
        self._buffer = self._buffer.lstrip(SPACE)
        if not self._buffer:
            return False
        start = self._think[0]
        if self._state == "thinking begins" and self._buffer.startswith(start):
            self._buffer = self._buffer[len(start) :]
        elif self._state == "thinking begins" and start.startswith(self._buffer):
            return False
        elif self._state == "thinking begun":
            self._state = "thinking"
            return True
        self._state = "thinking begun"
        return True

    def _read_thinking(self) -> bool:
        assert self._think is not None
        found = _find(self._buffer, (self._think[1],))
        at, end = found or (len(self._buffer), None)
        self._said.reasoning(self._buffer[:at])
        if end is None:
            self._buffer = self._buffer[at:]
            return False
        self._said.thought()
        self._buffer = self._buffer[at + len(end) :]
        self._state, self._first = "text", True
        return True


def _find(text: str, marks: tuple[str, ...]) -> tuple[int, str | None] | None:
    """The first mark: its place and itself, or None for itself while the text's end may be the beginning of one."""
    found = _pattern(marks).search(text) if marks else None
    if found is None:
        return None
    return found.start(), found[0] if found[0] in marks else None


@lru_cache(maxsize=64)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    whole = [re.escape(mark) for mark in marks]
    begun = [re.escape(mark[:length]) + r"\Z" for mark in marks for length in range(len(mark) - 1, 0, -1)]
    return re.compile("|".join(whole + begun))
