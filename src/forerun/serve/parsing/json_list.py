"""Several calls as JSON objects, in an array or one after the other: Llama 3, and Mistral's older form."""

from __future__ import annotations

from collections.abc import Collection

from forerun.serve.parsing.json_call import JsonCall
from forerun.serve.parsing.json_text import SPACE
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import CallReader, ReaderState

# Llama 3: the mark of its interpreter, or an answer that begins with an object.
LLAMA_MARKS = ("<|python_tag|>",)
LLAMA_FIRST_MARKS = ("{", "[")
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")


class JsonCalls(CallReader):
    """`{...}; {...}` or `[{...}, {...}]`."""

    def __init__(self, said: PieceCollector, raw: str, first_keys: Collection[str] | None = None) -> None:
        super().__init__(said, raw)
        self._first_keys = first_keys
        self._state = "open"
        self._array = False
        self._call: JsonCall | None = None

    def feed(self, letter: str) -> ReaderState:
        """Takes one letter."""
        if self._call is not None:
            return self._in_call(self._call, letter)
        if letter == "{":
            self._call = JsonCall(self.said, self.raw, self._first_keys)
            return self._in_call(self._call, letter)
        if letter not in SPACE and not self._separates(letter):
            return self.failed(letter) if self._state == "open" else self.over(self.raw + letter)
        self.raw += letter
        return self.over("") if self._state == "closed" else ReaderState.MORE

    def finish(self) -> None:
        """Says what an object holds back; what stands between calls says nothing."""
        if self._call is not None:
            self._call.finish()
        elif self._state != "open":
            self.raw = ""

    def _separates(self, letter: str) -> bool:
        """Is it what may stand before, between and after objects?"""
        if self._state == "open" and letter == "[" and not self._array:
            self._array = True
        elif self._state == "between" and letter == ("," if self._array else ";"):
            self._state = "next"
        elif self._state == "between" and letter == "]" and self._array:
            self._state = "closed"
        else:
            return False
        return True

    def _in_call(self, call: JsonCall, letter: str) -> ReaderState:
        reading = call.feed(letter)
        self.started, self.raw, self.rest = call.started, call.raw, call.rest
        if reading is ReaderState.OVER:
            self._call, self._state = None, "between"
            return ReaderState.MORE
        return reading


class LlamaReader(JsonCalls):
    """The mark may be the object's own first letter."""

    def __init__(self, said: PieceCollector, mark: str) -> None:
        bare = mark in LLAMA_FIRST_MARKS
        super().__init__(said, "" if bare else mark, _CALL_KEYS)
        if bare:
            self.feed(mark)
