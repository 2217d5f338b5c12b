"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Keys are bare, texts stand between quote tokens with nothing escaped in them, numbers and the words true, false and null
are bare. JSON's own quotes are read too; any other bare word is taken as a text.
"""

from __future__ import annotations

from forerun.serve.parsing.json_text import SPACE, JsonReader, Step, json_string
from forerun.serve.parsing.named_call import NamedCall
from forerun.serve.parsing.piece_collector import PieceCollector
from forerun.serve.parsing.reader import ReaderState
from forerun.serve.parsing.schema_types import ANY, value_as_json

MARKS = ("<|tool_call>",)
_QUOTE = '<|"|>'
_CALL = "call:"


class GemmaReader(NamedCall):
    """One call, its arguments turned into JSON as they come."""

    end_mark = "<tool_call|>"

    def __init__(self, said: PieceCollector, mark: str) -> None:
        super().__init__(said, mark, GemmaValue())
        self._state = "call"
        self._called = ""  # of `call:`

    def step(self, letter: str) -> ReaderState:
        """Takes one letter of the call."""
        if self._state == "name" and letter == "{" and self.name.strip(SPACE):
            self._state, self.name = "arguments", self.name.strip(SPACE)
        if self._state == "arguments":
            return self.in_arguments(letter)
        if not (self._in_call(letter) if self._state == "call" else self._in_name(letter)):
            return self.failed(letter)
        self.raw += letter
        return ReaderState.MORE

    def _in_call(self, letter: str) -> bool:
        if not self._called and letter in SPACE:
            return True
        self._called += letter
        if self._called == _CALL:
            self._state = "name"
        return _CALL.startswith(self._called)

    def _in_name(self, letter: str) -> bool:
        self.name += letter
        return letter not in "<>{}[]\n"


class GemmaValue(JsonReader):
    """An object in this form, as strict JSON. White space between its parts is left out."""

    def __init__(self) -> None:
        super().__init__()
        self._part = ""  # what is being read in a way that JSON does not have: a key, quote, text or bare value
        self._seen = ""  # of that

    @property
    def held(self) -> str:
        """As far as it came, and a comma only with what follows it."""
        if self._part == "text":
            return json_string(self._seen)
        if self._part == "bare":
            word = value_as_json(self._seen, ANY)
            return word[:-1] if word.startswith('"') else word
        if self._part == "key":
            return f'{self._comma}"{json_string(self._seen.strip(SPACE))}'
        return self._escape + self._word

    def feed(self, letter: str) -> tuple[Step, str]:
        """Takes one letter."""
        if self._part == "text":
            return Step.MORE, self._in_text(letter)
        if self._part:
            return {"key": self._in_key, "quote": self._in_quote, "bare": self._in_bare}[self._part](letter)
        if letter in SPACE and not self._string:
            return Step.MORE, ""
        return super().feed(letter)

    def _begin(self, part: str, seen: str) -> tuple[Step, str]:
        self._part, self._seen = part, seen
        return Step.MORE, ""

    def _begin_key(self, letter: str) -> tuple[Step, str]:
        if letter == "<":
            self._expect = "colon"  # after what is quoted
            return self._begin("quote", letter)
        if letter in '{}[],>:"':
            return super()._begin_key(letter)
        return self._begin("key", letter)

    def _begin_value(self, letter: str) -> tuple[Step, str]:
        if letter == "<":
            self._expect = "comma"
            return self._begin("quote", letter)
        if letter in '{[,}]:"':
            return super()._begin_value(letter)
        return Step.MORE, self._begin("bare", letter)[1] + self._with_comma("")

    def _in_key(self, letter: str) -> tuple[Step, str]:
        if letter in '{}[],<>"\n':
            return Step.FAILED, ""
        if letter != ":":
            self._seen += letter
            return Step.MORE, ""
        self._part, self._expect = "", "value"
        return Step.MORE, self._with_comma(f'"{json_string(self._seen.strip(SPACE))}":')

    def _in_quote(self, letter: str) -> tuple[Step, str]:
        self._seen += letter
        if self._seen == _QUOTE:
            self._begin("text", "")
            return Step.MORE, self._with_comma('"')
        return (Step.MORE if _QUOTE.startswith(self._seen) else Step.FAILED), ""

    def _in_text(self, letter: str) -> str:
        held = self._seen + letter
        if held == _QUOTE:
            self._part = ""
            return '"'
        sure = 0
        while not _QUOTE.startswith(held[sure:]):
            sure += 1
        self._seen = held[sure:]
        return json_string(held[:sure])

    def _in_bare(self, letter: str) -> tuple[Step, str]:
        if letter in "{[<":
            return Step.FAILED, ""
        if letter not in ",}]":
            self._seen += letter
            return Step.MORE, ""
        self._part = ""
        return self._word_over(value_as_json(self._seen.strip(SPACE), ANY), letter)
