"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`.

Keys are bare, texts stand between quote tokens with nothing escaped in them, numbers and the words true, false and null
are bare. JSON's own quotes are read too; any other bare word is taken as a text.
"""

from __future__ import annotations

from forerun.serve.parsing.json_text import SPACE, JsonReader, Step, json_string
from forerun.serve.parsing.reader import Closing, Reading
from forerun.serve.parsing.said import Said
from forerun.serve.parsing.schema_types import ANY, value_as_json

MARKS = ("<|tool_call>",)
_QUOTE = '<|"|>'
_CALL = "call:"
_DEEPEST = 200


class GemmaReader(Closing):
    """One call, its arguments turned into JSON as they come."""

    end_mark = "<tool_call|>"

    def __init__(self, said: Said, mark: str) -> None:
        super().__init__(said, mark)
        self._state = "call"
        self._seen = ""  # of `call:`, the name, a key, a bare value or a quote token
        self._name = ""
        self._stack: list[str] = []
        self._json = JsonReader()
        self._quoting_key = False
        self._comma = ""  # said with what follows it, so that one before a closing bracket is not
        self._unsaid = ""  # JSON that waits until the first key makes the call certain
        self._states = {
            "call": self._in_call,
            "name": self._in_name,
            "key": self._in_key,
            "colon": self._in_colon,
            "value": self._in_value,
            "item": self._in_value,
            "quote": self._in_quote,
            "text": self._in_text,
            "json text": self._in_json_text,
            "bare": self._in_bare,
            "comma": self._in_comma,
        }

    def step(self, letter: str) -> Reading:
        """Takes one letter of the call."""
        before = self.raw
        self.raw += letter
        if self._states[self._state](letter):
            return Reading.MORE
        self.finish()
        self.raw = "" if self.started and not self.raw else before
        return self.failed(letter)

    def finish(self) -> None:
        """Says what was held back, as far as it came."""
        if not self.started:
            return
        if self._state == "text":
            self._say(json_string(self._seen))
        elif self._state == "json text":
            self._say(self._json.held)
        elif self._state == "bare":
            word = value_as_json(self._seen, ANY)
            self._say(word[:-1] if word.startswith('"') else word)
        elif self._state == "key" and self._seen.strip(SPACE):
            self._say(f'"{json_string(self._seen.strip(SPACE))}')

    def _say(self, text: str) -> None:
        if text:
            text, self._comma = self._comma + text, ""
        if self.started:
            self.tell(text)
        else:
            self._unsaid += text

    def _certain(self) -> None:
        if not self.started:
            self.begin(self._name)
            self.tell(self._unsaid)

    def _in_call(self, letter: str) -> bool:
        if not self._seen and letter in SPACE:
            return True
        self._seen += letter
        if self._seen == _CALL:
            self._state, self._seen = "name", ""
            return True
        return _CALL.startswith(self._seen)

    def _in_name(self, letter: str) -> bool:
        if letter in "<>}[]\n":
            return False
        if letter != "{":
            self._name += letter
            return True
        self._name = self._name.strip(SPACE)
        return bool(self._name) and self._enter(letter)

    def _enter(self, letter: str) -> bool:
        self._stack.append(letter)
        self._say(letter)
        self._state, self._seen = ("key" if letter == "{" else "item"), ""
        return len(self._stack) <= _DEEPEST

    def _leave(self, letter: str) -> bool:
        if self._stack[-1] != ("{" if letter == "}" else "["):
            return False
        self._comma = ""
        self._certain()
        self._stack.pop()
        self._say(letter)
        self._state = "comma"
        if not self._stack:
            self.end()
            self.close()
        return True

    def _in_key(self, letter: str) -> bool:
        if not self._seen and letter in SPACE:
            return True
        if not self._seen and letter == "}":
            return self._leave(letter)
        if not self._seen and letter in '<"':
            self._quoting_key = True
            return self._begin_quoted(letter)
        if letter == ":" and self._seen:
            self._say(f'"{json_string(self._seen.strip(SPACE))}":')
            return self._key_over()
        if letter in '{}[],<>":\n':
            return False
        self._seen += letter
        return True

    def _key_over(self) -> bool:
        self._certain()
        self._state, self._seen = "value", ""
        return True

    def _in_colon(self, letter: str) -> bool:
        """After a key in quotes."""
        if letter != ":":
            return letter in SPACE
        self._say(letter)
        return self._key_over()

    def _in_value(self, letter: str) -> bool:
        if letter in SPACE:
            return True
        if letter in "{[":
            return self._enter(letter)
        if letter == "]" and self._state == "item":
            return self._leave(letter)
        if letter in '<"':
            self._quoting_key = False
            return self._begin_quoted(letter)
        if letter in ",}]:":
            return False
        self._state, self._seen = "bare", letter
        return True

    def _begin_quoted(self, letter: str) -> bool:
        if letter == '"':
            self._state, self._json = "json text", JsonReader()
            return self._in_json_text(letter)
        self._state, self._seen = "quote", letter
        return True

    def _in_quote(self, letter: str) -> bool:
        self._seen += letter
        if self._seen == _QUOTE:
            self._state, self._seen = "text", ""
            self._say('"')
        return not self._seen or _QUOTE.startswith(self._seen)

    def _in_text(self, letter: str) -> bool:
        held = self._seen + letter
        if held == _QUOTE:
            self._say('"')
            return self._quoted_over()
        sure = 0
        while not _QUOTE.startswith(held[sure:]):
            sure += 1
        self._seen = held[sure:]
        self._say(json_string(held[:sure]))
        return True

    def _in_json_text(self, letter: str) -> bool:
        step, text = self._json.feed(letter)
        self._say(text)
        return self._quoted_over() if step is Step.DONE else step is Step.MORE

    def _quoted_over(self) -> bool:
        self._state, self._seen = ("colon" if self._quoting_key else "comma"), ""
        return True

    def _in_bare(self, letter: str) -> bool:
        if letter in "{[<":
            return False
        if letter not in ",}]":
            self._seen += letter
            return True
        self._say(value_as_json(self._seen.strip(SPACE), ANY))
        self._state, self._seen = "comma", ""
        return self._in_comma(letter)

    def _in_comma(self, letter: str) -> bool:
        if letter in "}]":
            return self._leave(letter)
        if letter != ",":
            return letter in SPACE
        self._comma = letter
        self._state, self._seen = ("key" if self._stack[-1] == "{" else "item"), ""
        return True
