"""JSON as it arrives, letter by letter: is what came so far the beginning of a value, and where does it end?

Some things that models write and JSON forbids are set right on the way: line breaks and other control characters inside
a text are escaped, a backslash before a letter that needs none stands for itself (`\\d` in a search pattern), a comma
before a closing bracket is left out, and Python's True, False and None are JSON's.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DEEPEST = 200
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


class Step(Enum):
    """What one more letter did."""

    MORE = "more"  # it belongs to the value, which goes on
    DONE = "done"  # it ends the value
    BEFORE = "before"  # the value ended before it; the letter is not part of it
    FAILED = "failed"  # it cannot be JSON; the letter was not taken


def json_string(text: str) -> str:
    """The inside of a JSON text: what stands between its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def parse_json(text: str) -> Any:
    """The value; ValueError for what is not strict JSON (NaN, Infinity), too deep, or too long a number for Python.

    And for a text with half a character in it: JSON can spell one (`\\ud800`), but nobody can send it.
    """

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if isinstance(value, str):
        value.encode()
    return value


class JsonReader:
    """One value. `feed` gives the step and the letter as strict JSON has it."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expect = "value"
        self._string = False
        self._escape = ""  # a backslash and what came after it
        self._word = ""  # a number or a bare word
        self._comma = ""  # and the white space after it, until something follows

    @property
    def held(self) -> str:
        """What was taken and has not gone out: a comma, and an escape or word that has begun."""
        return self._comma + self._escape + self._word

    def feed(self, letter: str) -> tuple[Step, str]:
        """Takes one letter."""
        if self._string:
            return self._in_string(letter)
        if self._word:
            if letter.isascii() and (letter.isalnum() or letter in "+-."):
                return self._more_of_word(letter)
            return self._after_word(letter)
        if letter in SPACE:
            if not self._comma:
                return Step.MORE, letter
            self._comma += letter
            return Step.MORE, ""
        return self._structure(letter)

    def _after_word(self, letter: str) -> tuple[Step, str]:
        if not (_NUMBER.fullmatch(self._word) or self._word in _WORDS):
            return Step.FAILED, ""
        return self._word_over(_WORDS.get(self._word, self._word), letter)

    def _word_over(self, word: str, letter: str) -> tuple[Step, str]:
        """A number or a word, and the letter behind it."""
        self._word = ""
        if not self._stack:
            return Step.BEFORE, word
        self._expect = "comma"
        step, text = self.feed(letter)
        if step is Step.FAILED:
            self._word = word
        return step, word + text if step is not Step.FAILED else ""

    def _more_of_word(self, letter: str) -> tuple[Step, str]:
        word = self._word + letter
        # As far as it came it must be the beginning of a word or of a number.
        if word[0].isalpha():
            good = any(known.startswith(word) for known in _WORDS)
        elif len(word) > 2 and word[-3:].isdigit():
            good = True  # as good as the digit before it: to look at all of an endless number takes long
        else:
            good = any(_NUMBER.fullmatch(word + rest) for rest in ("", "0", "1"))
        if not good:
            return Step.FAILED, ""
        self._word = word
        return Step.MORE, ""

    def _in_string(self, letter: str) -> tuple[Step, str]:
        if self._escape:
            return self._in_escape(letter)
        if letter == "\\":
            self._escape = letter
            return Step.MORE, ""
        if letter != '"':
            return Step.MORE, letter if letter >= " " else json_string(letter)
        self._string = False
        if self._expect == "colon":
            return Step.MORE, letter
        return self._value_over(letter)

    def _in_escape(self, letter: str) -> tuple[Step, str]:
        escape = self._escape + letter
        if escape[1] == "u" and len(escape) > 2 and letter not in "0123456789abcdefABCDEF":
            return Step.FAILED, ""
        if escape[1] == "u" and len(escape) < 6:
            self._escape = escape
            return Step.MORE, ""
        self._escape = ""
        if escape[1] in '"\\/bfnrtu':
            return Step.MORE, escape
        return Step.MORE, "\\\\" + (letter if letter >= " " else json_string(letter))

    def _structure(self, letter: str) -> tuple[Step, str]:
        expect = self._expect
        if expect in ("value", "value or end"):
            if letter == "]" and expect == "value or end":
                return self._close("[", letter)
            return self._begin_value(letter)
        if expect == "key or end":
            return self._close("{", letter) if letter == "}" else self._begin_key(letter)
        if expect == "colon":
            if letter != ":":
                return Step.FAILED, ""
            self._expect = "value"
            return Step.MORE, letter
        if letter == "," and self._stack:
            self._expect = "key or end" if self._stack[-1] == "{" else "value or end"
            self._comma = letter
            return Step.MORE, ""
        if letter in "]}":
            return self._close("[" if letter == "]" else "{", letter)
        return Step.FAILED, ""

    def _begin_key(self, letter: str) -> tuple[Step, str]:
        if letter != '"':
            return Step.FAILED, ""
        self._string, self._expect = True, "colon"
        return Step.MORE, self._with_comma(letter)

    def _begin_value(self, letter: str) -> tuple[Step, str]:
        if letter == '"':
            self._string, self._expect = True, "comma"
        elif letter in "{[":
            if len(self._stack) >= _DEEPEST:
                return Step.FAILED, ""
            self._stack.append(letter)
            self._expect = "key or end" if letter == "{" else "value or end"
        elif letter in "-0123456789tfnTFN":
            self._word = letter
            return Step.MORE, self._with_comma("")
        else:
            return Step.FAILED, ""
        return Step.MORE, self._with_comma(letter)

    def _with_comma(self, text: str) -> str:
        comma, self._comma = self._comma, ""
        return comma + text

    def _close(self, kind: str, letter: str) -> tuple[Step, str]:
        if not self._stack or self._stack[-1] != kind:
            return Step.FAILED, ""
        self._stack.pop()
        self._comma = ""
        return self._value_over(letter)

    def _value_over(self, letter: str) -> tuple[Step, str]:
        self._expect = "comma"
        return (Step.MORE if self._stack else Step.DONE), letter
