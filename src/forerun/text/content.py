"""What a message holds: text, or a list of parts of which some are places of media.

A place is a part with nothing but its type: `{"type": "image"}`. The template writes a placeholder there; what the
picture looks like is none of its business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEDIA_KINDS = ("image", "video", "audio")
PLURALS = {"image": "images", "video": "videos", "audio": "audio"}
BETWEEN = "\n\n"  # texts that come from different places


def text_of(content: Any) -> str:
    """A content's text: nothing, text, or the texts in a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def media_in(content: Any) -> list[str]:
    """The kinds of media in a content, in order."""
    if content is None or isinstance(content, str):
        return []
    return [part["type"] for part in content if part["type"] in MEDIA_KINDS]


def plain(content: Any) -> Any:
    """Text wherever there is nothing but text: all templates take that. Texts beside each other are one text.

    What stands in one text is looked through for control tokens; a template could put one together from two.
    """
    if not media_in(content):
        return text_of(content)
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text" and parts and parts[-1]["type"] == "text":
            parts[-1] = text_part(parts[-1]["text"] + part["text"])
        else:
            parts.append(dict(part))
    return parts


def text_part(text: str) -> dict[str, str]:
    """Text in a list of parts."""
    return {"type": "text", "text": text}


def in_parts(content: Any) -> list[dict[str, Any]]:
    """A content as a list, whatever it was."""
    return [text_part(content)] if isinstance(content, str) else content


def text_before(texts: Sequence[str], content: Any) -> Any:
    """The content after other texts."""
    if isinstance(content, str):
        return BETWEEN.join([*texts, content])
    first, rest = _text_at(content, 0), content
    if first is not None:
        texts, rest = [*texts, first], content[1:]
    return [text_part(BETWEEN.join(texts)), *rest]


def text_after(content: Any, texts: Sequence[str]) -> Any:
    """The content before other texts."""
    if isinstance(content, str):
        return BETWEEN.join([content, *texts])
    last, rest = _text_at(content, -1), content
    if last is not None:
        texts, rest = [last, *texts], content[:-1]
    return [*rest, text_part(BETWEEN.join(texts))]


def _text_at(parts: Sequence[Mapping[str, Any]], index: int) -> str | None:
    part = parts[index]
    return part["text"] if part["type"] == "text" else None
