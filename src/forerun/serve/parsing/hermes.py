"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from forerun.serve.parsing.json_call import JsonCall
from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.reader import Base, Reading
from forerun.serve.parsing.said import Said

START, END = "<tool_call>", "</tool_call>"
MARKS = (START,)


class HermesReader(Base):
    """One call. A missing end mark does not matter: the object says where the call ends."""

    def __init__(self, said: Said, mark: str) -> None:
        super().__init__(said, mark)
        self._call: JsonCall | None = JsonCall(said, mark)
        self._mark = ""  # of the end mark

    def feed(self, letter: str) -> Reading:
        """Takes one letter."""
        if self._call is None:
            return self._after(letter)
        reading = self._call.feed(letter)
        self.started, self.raw, self.rest = self._call.started, self._call.raw, self._call.rest
        if reading is Reading.OVER:
            self._call = None
            return Reading.MORE
        return reading

    def finish(self) -> None:
        """A call without its end mark is complete; what came of the mark says nothing."""
        if self._call is None:
            self.raw = ""
        else:
            self._call.finish()

    def _after(self, letter: str) -> Reading:
        if self._mark or letter not in SPACE:
            self._mark += letter
            if not END.startswith(self._mark):
                return self.over(self.raw + letter)
        self.raw += letter
        return self.over("") if self._mark == END else Reading.MORE
