"""Which media a model can read, in words."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import ForerunError
from forerun.media.parts import Kind, MediaPart, MediaReader
from forerun.text.content import MEDIA_KINDS, PLURALS


def checked_reader(name: str, reader: MediaReader | None, parts: Sequence[MediaPart]) -> MediaReader:
    """The reader, when it can read all of these; `name` is the model's."""
    for part in parts:
        check_kind(name, reader, part.kind)
    assert reader is not None, "without media there is nothing to read"
    return reader


def check_no_places(reader: MediaReader | None, ids: Sequence[int]) -> None:
    """Refuses a prompt without media that has places for some: what such tokens say was never trained."""
    places = 0 if reader is None else sum(token in reader.placeholders for token in ids)
    if places:
        raise ForerunError(
            f"the prompt has {places} {'placeholder' if places == 1 else 'placeholders'} for media and no files came "
            "with it: there must be one for each"
        )


def check_kind(name: str, reader: MediaReader | None, kind: Kind) -> None:
    """`ForerunError` for what the model cannot read."""
    if reader is None or kind not in reader.kinds:
        raise ForerunError(f"{name or 'this model'} reads {what_is_read(reader)}; it cannot take {PLURALS[kind]}")


def what_is_read(reader: MediaReader | None) -> str:
    """In words: "text only", "text and images", "text, images and audio"."""
    words = ["text", *(PLURALS[kind] for kind in MEDIA_KINDS if reader is not None and kind in reader.kinds)]
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "text only"
