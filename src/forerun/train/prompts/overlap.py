"""Keeps the prompts of the evaluation out of the training data."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS = 8  # so many words in a row in common make two prompts near duplicates


class Overlap:
    """Knows some texts; says whether another one equals one of them or shares eight words in a row with one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole: set[str] = set()
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            words = _words(text)
            self._whole.add(" ".join(words))
            self._runs.update(_runs(words))

    def found_in(self, text: str) -> bool:
        words = _words(text)
        return " ".join(words) in self._whole or any(run in self._runs for run in _runs(words))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: list[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1))
