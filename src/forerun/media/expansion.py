"""Placeholders of a prompt: one stands for each part, and as many take its place as the part has rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import ForerunError
from forerun.media.parts import Kind, MediaPart


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that belong together: a picture, a frame, a recording."""

    start: int  # in tokens of what takes the placeholder's place
    rows: int
    grid: tuple[int, int] = (0, 0)  # rows and columns of a picture, for models that count them


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """What one part makes of its placeholder."""

    kind: Kind
    tokens: list[int]  # what takes the placeholder's place
    stretches: list[Stretch]

    @property
    def rows(self) -> int:
        return sum(stretch.rows for stretch in self.stretches)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared(Expansion):
    """One part, ready for its tower."""

    inputs: Any  # for the family's `encode`


class TokenList:
    """Tokens in the making: text, and stretches of placeholders."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.stretches: list[Stretch] = []

    def stretch(self, before: Sequence[int], placeholder: int, rows: int, after: Sequence[int], **options: Any) -> None:
        """Text, `rows` placeholders, text."""
        self.tokens += before
        self.stretches.append(Stretch(len(self.tokens), rows, **options))
        self.tokens += [placeholder] * rows
        self.tokens += after


def places(ids: Sequence[int], parts: Sequence[MediaPart], placeholders: Mapping[int, Kind]) -> list[int]:
    """Where in `ids` each part stands."""
    found = [place for place, token in enumerate(ids) if token in placeholders]
    if len(found) != len(parts):
        raise ForerunError(
            f"the prompt has {len(found)} placeholders for media and {len(parts)} files came with it: there must be "
            "one for each"
        )
    for place, part in zip(found, parts, strict=True):
        kind = placeholders[ids[place]]
        if kind != part.kind:
            raise ForerunError(f"{part.name} comes as {part.kind}, and its place in the prompt is one for {kind}")
    return found
