"""Stop strings over text that arrives in pieces: nothing that might belong to a stop string is shown too early.

The rule, whatever the pieces: the stop string that is complete first ends the text; of several complete at the same
character the one that starts earliest. Nothing from its first character on is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import ForerunError

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000


class StopStrings:
    """Holds text back while it could be the beginning of a stop string.

    >>> stops = StopStrings(["</end>"])
    >>> stops.push("hello </e")
    ('hello ', False)
    >>> stops.push("m> </end> more")
    ('</em> ', True)
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._matchers = [_Matcher(stop) for stop in _checked(stops)]
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; returns the text that is safe to show now, and whether a stop string was found."""
        if self.found is not None:
            return "", True
        if not self._matchers:
            return text, False
        for index, character in enumerate(text):
            found = self._advance(character)
            if found:
                seen = self._held + text[: index + 1]
                self.found = seen[len(seen) - found :]
                self._held = ""
                return seen[: len(seen) - found], True
        seen = self._held + text
        safe = len(seen) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = seen[safe:]
        return seen[:safe], False

    def flush(self) -> str:
        """The text is over: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held

    def _advance(self, character: str) -> int:
        """The length of the longest stop string that ends with this character, or 0."""
        found = 0
        for matcher in self._matchers:
            if matcher.advance(character):
                found = max(found, matcher.length)
        return found


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: `matched` is the longest suffix of the text that begins the stop."""

    __slots__ = ("_fallback", "_stop", "length", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self._fallback = _borders(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Takes one character; True when it completes the stop string, after which the matcher is spent."""
        matched = self.matched
        while matched and self._stop[matched] != character:
            matched = self._fallback[matched]
        if self._stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched == self.length


def _borders(stop: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for character in stop[1:]:
        border = borders[-1]
        while border and stop[border] != character:
            border = borders[border]
        borders.append(border + (stop[border] == character))
    return borders


def _checked(stops: Sequence[str]) -> Sequence[str]:
    if isinstance(stops, str):
        raise ForerunError("stop strings must be given as a list, for example stop=['\\n\\n']")
    if len(stops) > MAX_STOPS:
        raise ForerunError(f"{len(stops)} stop strings were given; use at most {MAX_STOPS}")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ForerunError("a stop string is empty or not text; leave it out or give at least one character")
        if len(stop) > MAX_STOP_LENGTH:
            raise ForerunError(f"a stop string has {len(stop)} characters; use at most {MAX_STOP_LENGTH}")
    return stops
