"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from forerun.serve.parsing.json_call import JsonCall
from forerun.serve.parsing.reader import Closing, Reading
from forerun.serve.parsing.said import Said

MARKS = ("<tool_call>",)


class HermesReader(Closing):
    """One call."""

    end_mark = "</tool_call>"

    def __init__(self, said: Said, mark: str) -> None:
        super().__init__(said, mark)
        self._call = JsonCall(said, mark)

    def step(self, letter: str) -> Reading:
        """Takes one letter of the object."""
        reading = self._call.feed(letter)
        self.started, self.raw, self.rest = self._call.started, self._call.raw, self._call.rest
        return self.close() if reading is Reading.OVER else reading

    def finish(self) -> None:
        """Says what the object holds back."""
        self._call.finish()
