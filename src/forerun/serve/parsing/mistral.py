"""Mistral: `[TOOL_CALLS]name[ARGS]{...}`, and the older `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""

from __future__ import annotations

from forerun.serve.parsing.json_list import JsonCalls
from forerun.serve.parsing.json_text import SPACE, JsonReader, Step
from forerun.serve.parsing.reader import Base, Reading
from forerun.serve.parsing.said import Said

MARKS = ("[TOOL_CALLS]",)
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class MistralReader(Base):
    """What follows one mark: a name with its arguments, or a list."""

    def __init__(self, said: Said, mark: str) -> None:
        super().__init__(said, mark)
        self._list: JsonCalls | None = None
        self._state = "name"
        self._name = ""
        self._tag = ""
        self._value = JsonReader()
        self._text = ""  # of the arguments, until they are told

    def feed(self, letter: str) -> Reading:
        """Takes one letter."""
        if self._list is None and self._state == "name" and not self._name and letter in "[{":
            self._list = JsonCalls(self.said, self.raw)
        if self._list is not None:
            reading = self._list.feed(letter)
            self.started, self.raw, self.rest = self._list.started, self._list.raw, self._list.rest
            return reading
        if self._state == "arguments":
            return self._in_arguments(letter)
        good = self._in_name(letter) if self._state in ("name", "id") else self._in_tag(letter)
        if not good:
            return self.failed(letter)
        self.raw += letter
        return self._in_arguments(letter, taken=True) if self._state == "arguments" and letter == "{" else Reading.MORE

    def finish(self) -> None:
        """Says what was begun and held back."""
        if self._list is not None:
            self._list.finish()
            self.raw = self._list.raw
        elif self.started:
            self.tell(self._value.held)

    def _in_name(self, letter: str) -> bool:
        if letter == "[" or (self._state == "name" and letter in SPACE and self._name):
            self._state, self._tag = "tag", letter.strip(SPACE)
            return bool(self._name)
        if letter == "{" and self._state == "name":
            self._state = "arguments"
            return bool(self._name)
        if letter in SPACE:
            return not self._name
        if self._state == "name":
            self._name += letter
        return letter.isalnum() or letter in "_-.:/"

    def _in_tag(self, letter: str) -> bool:
        if not self._tag and letter in SPACE:
            return True
        if not self._tag and letter == "{":
            self._state = "arguments"
            return True
        self._tag += letter
        if self._tag == _ARGS:
            self._state = "arguments"
        elif self._tag == _CALL_ID:
            self._state = "id"
        return _ARGS.startswith(self._tag) or _CALL_ID.startswith(self._tag)

    def _in_arguments(self, letter: str, *, taken: bool = False) -> Reading:
        step, text = self._value.feed(letter)
        if step in (Step.FAILED, Step.BEFORE) or (not self._text and letter not in "{" + SPACE and not self.started):
            self.finish()
            return self.failed(letter)
        if self.started:
            self.tell(text)
        else:
            self.raw += "" if taken else letter
            self._text += text if self._text else text.lstrip(SPACE)
            # Two good letters of an object make it a call.
            if len(self._text) > 1 and text.strip(SPACE):
                told = self._text
                self.begin(self._name)
                self.tell(told)
        if step is Step.DONE:
            self.end()
            return self.over("")
        return Reading.MORE
