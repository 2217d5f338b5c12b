"""The text of one answer as it grows: whole characters, nothing of a stop string."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from forerun.text.detokenizer import Detokenizer
from forerun.text.stops import StopStrings


class NoText:
    """A `TextSink` for those who want tokens, or make the text elsewhere."""

    def push(self, token: int) -> tuple[str, bool]:  # noqa: ARG002
        """Nothing to show, and nothing ends it."""
        return "", False

    def flush(self) -> str:
        """Nothing was held back."""
        return ""


class AnswerText:
    """Feed it tokens; it hands out text that is safe to show."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Sequence[str],
        shown: Collection[str] = (),
        *,
        keep_stop: bool = False,
    ) -> None:
        """`shown`: special tokens that give text, which others do not; `keep_stop`: the stop string is shown, too."""
        self.shown = frozenset(shown)
        self._detokenizer = Detokenizer(tokenizer, prompt, shown)
        self._stops = StopStrings(stops)
        self._keep_stop = keep_stop
        self.stopped = False  # by a stop string

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string was completed."""
        if self.stopped:
            return "", True
        text, self.stopped = self._stops.push(self._detokenizer.push(token))
        return (text + (self.stop or "") if self._keep_stop else text), self.stopped

    def flush(self) -> str:
        """What was held back, as the end of the answer shows it. It may still go on: then pushing shows it anew."""
        if self.stopped:
            return ""
        stops = copy.deepcopy(self._stops)
        text, stopped = stops.push(self._detokenizer.held())
        return text if stopped else text + stops.flush()
