"""A call as a JSON object, `{"name": ..., "arguments": {...}}`: three families have it inside marks of their own."""

from __future__ import annotations

from collections.abc import Collection

from forerun.serve.parsing.json_text import SPACE, JsonReader, Step, parse_json
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import Closing, ReaderState

ARGUMENTS = ("arguments", "parameters")
HERMES_MARKS = ("<tool_call>",)


class JsonCall(Closing):
    """From the opening brace to the closing one, or to an end mark behind it.

    Arguments are told as they come, once the name is known.

    Arguments that are null or missing are an empty object; arguments that were written as text hold the object in it.
    Other keys (an id) are read and left out.
    """

    def __init__(self, said: PieceCollector, raw: str, first_keys: Collection[str] | None = None) -> None:
        """`first_keys`: of a call without marks; with another key first, or without arguments, it is just JSON."""
        super().__init__(said, raw)
        self._bare = first_keys is not None
        self._first_keys = first_keys
        self._state = "open"
        self._value = JsonReader()
        self._text = ""  # of the key or value being read, as strict JSON
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._told = False  # the letter at hand went out, or waits in an escape that will

    def step(self, letter: str) -> ReaderState:
        """Takes one letter of the object."""
        self._told = False
        reading = self._in_object(letter)
        if reading is ReaderState.MORE and not self._told and not self.complete:
            self.raw += letter
        return reading

    def finish(self) -> None:
        """Says what was begun and held back."""
        if self._streaming():
            self.said.arguments(self._value.held)

    def _in_object(self, letter: str) -> ReaderState:
        state = self._state
        if state in ("key", "value"):
            return self._in_json(letter)
        if letter in SPACE:
            return ReaderState.MORE
        if state == "open" and letter == "{":
            self._state = "key or end"
        elif state in ("key or end", "next key") and letter == '"':
            self._state, self._value, self._text = "key", JsonReader(), ""
            return self._in_json(letter)
        elif state == "colon" and letter == ":":
            self._state, self._value, self._text = "value", JsonReader(), ""
        elif state == "comma" and letter == ",":
            self._state = "next key"
        elif state in ("comma", "key or end") and letter == "}":
            return self._closed(letter)
        else:
            return self.failed(letter)
        return ReaderState.MORE

    def _in_json(self, letter: str) -> ReaderState:
        step, text = self._value.feed(letter)
        if step is Step.FAILED:
            self.finish()
            return self.failed(letter)
        if self._streaming():
            self._told = True
            self.said.arguments(text)
        else:
            self._text += text if self._text else text.lstrip(SPACE)
            if self._may_stream(text):
                self._begin_with(self._text)
        if step is Step.MORE:
            return ReaderState.MORE
        if self._state == "key":
            return self._keep_key(letter)
        if not self._keep_value():
            return self.failed(letter)
        self._state = "comma"
        return self._in_object(letter) if step is Step.BEFORE else ReaderState.MORE

    def _keep_key(self, letter: str) -> ReaderState:
        self._key, self._state = _text_in(self._text), "colon"
        if self._first_keys is not None and self._key not in self._first_keys:
            return self.failed(letter)
        self._first_keys = None
        return ReaderState.MORE

    def _streaming(self) -> bool:
        return self.started and self._state == "value" and self._arguments is None and self._key in ARGUMENTS

    def _may_stream(self, new: str) -> bool:
        """The arguments of a known call are an object, and what it begins with is good JSON: `new` is more of that."""
        if self.started or self._name is None or self._state != "value" or self._key not in ARGUMENTS:
            return False
        return self._arguments is None and self._text[:1] == "{" and len(self._text) > 1 and bool(new.strip(SPACE))

    def _keep_value(self) -> bool:
        """A key's value is there as a whole: is it what a call has?"""
        if self._key == "name" and self._name is None:
            self._name = _text_in(self._text) or None
            if self._name is None:
                return False
            if self._arguments is not None:
                self._begin_with(self._arguments)
        elif self._key in ARGUMENTS and self._arguments is None:
            arguments = "" if self.started else _object_text(self._text)
            if arguments is None:
                return False
            self._arguments = arguments
            if self._name is not None and not self.started:
                self._begin_with(arguments)
        return True

    def _begin_with(self, arguments: str) -> None:
        self._told = True
        self.begin(str(self._name))
        self.said.arguments(arguments)

    def _closed(self, letter: str) -> ReaderState:
        if self._name is None or (self._bare and not self.started):
            return self.failed(letter)
        if not self.started:
            self._begin_with("{}")
        self.end()
        return self.close()


class HermesReader(JsonCall):
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    end_mark = "</tool_call>"


def _text_in(json: str) -> str:
    """What a JSON text says; nothing if it is something else, or cannot be sent."""
    try:
        value = parse_json(json)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _object_text(text: str) -> str | None:
    """Arguments as the text of an object, or None if they are none."""
    try:
        value = parse_json(text)
        if value is None:
            return "{}"
        if isinstance(value, str):
            text, value = value, parse_json(value)
    except ValueError:
        return None
    return text.strip(SPACE) if isinstance(value, dict) else None
