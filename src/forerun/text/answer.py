"""The text of one answer as it grows: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.text.detokenizer import Detokenizer
from forerun.text.stops import StopStrings


class AnswerText:
    """Feed it tokens; it hands out text that is safe to show."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._ended = False

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string was completed."""
        text, self._ended = self._stops.push(self._detokenizer.push(token))
        return text, self._ended

    def flush(self) -> str:
        """What was held back; nothing after a stop string."""
        if self._ended:
            return ""
        text, self._ended = self._stops.push(self._detokenizer.flush())
        return text if self._ended else text + self._stops.flush()
