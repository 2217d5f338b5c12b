"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Values are bare text. The tool's schema says what they are: texts go out as they come, everything else is read as JSON
when it is complete. One line break at either end of a value belongs to the form, not to the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.serve.chat_job import Tool
from forerun.serve.parsing.json_text import SPACE, json_string
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import Closing, ReaderState
from forerun.serve.parsing.schema_types import parameter_types, value_as_json

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
MARKS = ("<tool_call>", _FUNCTION)
_TEXT = frozenset({"string"})


class QwenCoderReader(Closing):
    """One call; some models leave out the outer mark."""

    end_mark = "</tool_call>"

    def __init__(self, said: PieceCollector, mark: str, tools: Sequence[Tool]) -> None:
        super().__init__(said, mark)
        self._parameters: Mapping[str, Mapping[str, object]] = {tool.name: tool.parameters for tool in tools}
        self._state = "name" if mark == _FUNCTION else "open"
        self._tag = ""
        self._name = self._key = ""
        self._types = _TEXT
        self._begun = False  # the value has more than its first line break
        self._held = ""  # of a value: what may belong to its end
        self._value: list[str] = []  # of a value that is not a text
        self._first = True  # no argument so far

    def step(self, letter: str) -> ReaderState:
        """Takes one letter of the call."""
        if self._state == "value":
            return self._in_value(letter)
        good = self._in_header(letter) if self._state in ("name", "key") else self._in_tag(letter)
        if not good:
            return self.failed(letter)
        if not self.complete and self._state != "value":
            self.raw += letter
        return ReaderState.MORE

    def finish(self) -> None:
        """Says the part of a value that was held back."""
        if self._state == "value" and self.started:
            text = "".join(self._value) + self._held
            self.tell(json_string(self._held) if self._types == _TEXT else text)

    def _in_tag(self, letter: str) -> bool:
        if not self._tag and letter in SPACE:
            return True
        self._tag += letter
        wanted = {_FUNCTION: "name"} if self._state == "open" else {_PARAMETER: "key", _FUNCTION_END: "end"}
        if self._tag not in wanted:
            return any(tag.startswith(self._tag) for tag in wanted)
        self._state, self._tag = wanted[self._tag], ""
        if self._state == "key":
            self._key = ""
        if self._state == "end":
            self._begin()
            self.tell("{}" if self._first else "}")
            self.end()
            self.close()
        return True

    def _begin(self) -> None:
        if not self.started:
            self.begin(self._name)

    def _in_header(self, letter: str) -> bool:
        """The name of the function or of a parameter, up to the bracket."""
        text = self._name if self._state == "name" else self._key
        if letter != ">":
            if self._state == "name":
                self._name += letter
            else:
                self._key += letter
            return letter not in "<\n"
        if self._state == "name":
            self._name, self._state = text.strip(SPACE), "between"
            return bool(self._name)
        self._begin_value(text.strip(SPACE))
        return True

    def _begin_value(self, key: str) -> None:
        self._begin()
        self._types = parameter_types(self._parameters.get(self._name, {}), key)
        quote = '"' if self._types == _TEXT else ""
        self.tell(f'{"{" if self._first else ", "}"{json_string(key)}": {quote}')
        self._state, self._begun, self._held, self._value, self._first = "value", False, "", [], False

    def _in_value(self, letter: str) -> ReaderState:
        if not self._begun:
            self._begun = True
            if letter == "\n":
                return ReaderState.MORE
        held = self._held + letter
        ends = (_PARAMETER_END, "\n" + _PARAMETER_END)
        if held in ends:
            self.tell('"' if self._types == _TEXT else value_as_json("".join(self._value), self._types))
            self._state = "between"
            return ReaderState.MORE
        sure = 0
        while not any(end.startswith(held[sure:]) for end in ends):
            sure += 1
        self._held = held[sure:]
        if self._types == _TEXT:
            self.tell(json_string(held[:sure]))
        else:
            self._value.append(held[:sure])
        return ReaderState.MORE
