"""Mistral: `[TOOL_CALLS]name[ARGS]{...}`, and the older `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""

from __future__ import annotations

from forerun.serve.parsing.json_list import JsonCalls
from forerun.serve.parsing.json_text import SPACE, JsonReader
from forerun.serve.parsing.named_call import NamedCall
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import ReaderState

MARKS = ("[TOOL_CALLS]",)
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralReader(NamedCall):
    """What follows one mark: a name with its arguments, or a list."""

    def __init__(self, said: PieceCollector, mark: str) -> None:
        super().__init__(said, mark, JsonReader())
        self._list: JsonCalls | None = None
        self._state = "name"
        self._tag = ""

    def step(self, letter: str) -> ReaderState:
        """Takes one letter."""
        if self._list is None and self._state == "name" and not self.name and letter in "[{":
            self._list = JsonCalls(self.said, self.raw)
        if self._list is not None:
            reading = self._list.feed(letter)
            self.started, self.raw, self.rest = self._list.started, self._list.raw, self._list.rest
            return reading
        if self._state == "arguments" or (letter == "{" and self._tag == "" and self._state != "id" and self.name):
            self._state = "arguments"
            return self.in_arguments(letter)
        good = self._in_name(letter) if self._state in ("name", "id") else self._in_tag(letter)
        if not good:
            return self.failed(letter)
        self.raw += letter
        return ReaderState.MORE

    def finish(self) -> None:
        """Says what was begun and held back."""
        if self._list is not None:
            self._list.finish()
            self.raw = self._list.raw
        else:
            super().finish()

    def _in_name(self, letter: str) -> bool:
        if letter == "[" or (self._state == "name" and letter in SPACE and self.name):
            self._state, self._tag = "tag", letter.strip(SPACE)
            return bool(self.name)
        if letter in SPACE:
            return not self.name
        if self._state == "name":
            self.name += letter
        return letter.isalnum() or letter in "_-.:/"

    def _in_tag(self, letter: str) -> bool:
        if not self._tag and letter in SPACE:
            return True
        self._tag += letter
        if self._tag == _ARGS:
            self._state = "arguments"
        elif self._tag == _CALL_ID:
            self._state = "id"
        return _ARGS.startswith(self._tag) or _CALL_ID.startswith(self._tag)
