"""How many values a JSON body has, counted as it comes in: reading millions of them would stop all other answers."""

from __future__ import annotations

import re

MOST = 1 << 20  # what a million numbers count; they take a few tenths of a second to read and check
CONTAINER = 10  # a list, an object or one of its keys takes as long as so many numbers

# A whole string, or the quote of one that goes on in the next part of the body. Never looks at a byte twice.
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(").*\Z', re.DOTALL)


class JsonSize:
    """Of one body. What stands in strings does not count, however they are cut into parts."""

    def __init__(self) -> None:
        self._counted = 0
        self._open = b""  # the beginning of a string that has not ended yet, as far as it matters

    def add(self, part: bytes) -> bool:
        """False: there are too many."""
        text = self._open + part
        outside = STRINGS.sub(rb"\1", text)
        self._open = b""
        if outside.endswith(b'"'):
            backslashes = len(text) - len(text.rstrip(b"\\"))
            self._open = b'"\\' if backslashes % 2 else b'"'
        self._counted += outside.count(b",") + CONTAINER * sum(outside.count(mark) for mark in (b"[", b"{", b":"))
        return self._counted <= MOST
