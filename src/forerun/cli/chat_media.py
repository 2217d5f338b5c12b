"""Media in a terminal's chat: files that go with the next message, and how a server gets them."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.home import expanded
from forerun.media.parts import Kind
from forerun.media.sources import from_file
from forerun.text.content import MEDIA_KINDS

OPENAI_FORMATS = ("wav", "mp3")  # of sound; all others go in the form that vLLM added
USUAL = {"image": "png", "video": "mp4", "audio": "wav"}  # where a file's name does not say


def attached_part(kind: Kind, name: str) -> dict[str, str]:
    """A file as part of a message; the same file wherever the chat is taken up again."""
    if not name:
        raise ForerunError(f"/{kind} needs the name of a file")
    path = expanded(name)
    from_file(kind, path)  # what cannot be read is said now
    return {"type": kind, "path": str(path.absolute())}


def is_kept_content(content: Any) -> bool:
    """Is it what a saved chat may hold: text, or texts and files?"""
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(isinstance(part, dict) and _is_part(part) for part in content)


def _is_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    names = {"type", "text"} if kind == "text" else {"type", "path"}
    known = kind == "text" or kind in MEDIA_KINDS
    return known and part.keys() == names and all(isinstance(value, str) for value in part.values())


def sent_content(content: Any) -> Any:
    """A content as OpenAI's clients send it: files inside the request."""
    return content if isinstance(content, str) else [_sent(part) for part in content]


def _sent(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return dict(part)
    data = base64.b64encode(from_file(kind, part["path"]).data).decode()
    suffix = Path(part["path"]).suffix.lstrip(".").lower()
    if kind == "audio" and suffix in OPENAI_FORMATS:
        return {"type": "input_audio", "input_audio": {"data": data, "format": suffix}}
    guessed = (mimetypes.guess_type(part["path"])[0] or "").partition("/")
    subtype = guessed[2] if guessed[0] == kind else USUAL[kind]
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{kind}/{subtype};base64,{data}"}}
