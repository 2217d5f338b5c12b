"""Media in prompts: taken out of messages, where a place stays for the template to mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from forerun.errors import ForerunError
from forerun.media.parts import Kind, MediaPart
from forerun.media.sources import media_part
from forerun.text.content import PLURALS, in_parts
from forerun.text.messages import Message

KINDS: tuple[Kind, ...] = get_args(Kind)


def take_media(messages: Sequence[Message]) -> tuple[list[Message], list[MediaPart]]:
    """Messages whose media are places, `{"type": "image"}`, and the media in the same order.

    A part of a message is `{"type": "image", "image": ...}` with a path, a data URI, bytes or a picture of Pillow's, or
    `{"type": "image", "path": ...}`; video and audio alike, as in the chat templates of transformers.
    """
    taken: list[MediaPart] = []
    left: list[Message] = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_place(part, number, taken) for part in content]}
        left.append(message)
    return left, taken


def _place(part: Any, number: int, taken: list[MediaPart]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in KINDS:
        return part  # text; or something that is refused where messages are checked
    given = {key: value for key, value in part.items() if key != "type"}
    if len(given) != 1 or not given.keys() <= {kind, "path", "url"}:
        raise ForerunError(f'message {number}: an {kind} is given as {{"type": "{kind}", "{kind}": a path or bytes}}')
    same = sum(one.kind == kind for one in taken) + 1
    taken.append(media_part(kind, next(iter(given.values())), f"{kind} {same}"))
    return {"type": kind}


def split_prompt(prompt: Any, given: Mapping[Kind, Sequence[Any]], *, templated: bool) -> tuple[Any, list[MediaPart]]:
    """Any prompt of the library's, and the media that belong to its places. `templated`: text goes into a template."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ForerunError("the prompt must be text, a list of messages or a list of token ids (whole numbers)")
    messages = not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)
    if messages or (isinstance(prompt, str) and templated and any(given.values())):
        return take_media(with_media(prompt, given))
    return prompt, media_list(given)


def with_media(prompt: Any, given: Mapping[Kind, Sequence[Any]]) -> Any:
    """A prompt for the chat template with further media, before the text of its last message of the user."""
    parts = [{"type": kind, kind: source} for kind in KINDS for source in given.get(kind, ())]
    if not parts:
        return prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*parts, *_text(prompt)]}]
    messages = list(prompt)
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if last is None:
        named = PLURALS[parts[0]["type"]]
        raise ForerunError(f"{named} go into a message of the user, and there is none")
    content = messages[last].get("content")
    if not isinstance(content, str | list | tuple | None):
        return messages  # refused where messages are checked
    old = in_parts(content) if isinstance(content, str) else list(content or ())
    messages[last] = {**messages[last], "content": [*parts, *old]}
    return messages


def media_list(given: Mapping[Kind, Sequence[Any]]) -> list[MediaPart]:
    """For a prompt that has its placeholders already: images, then videos, then audio."""
    return [
        media_part(kind, source, f"{kind} {number}")
        for kind in KINDS
        for number, source in enumerate(given.get(kind, ()), start=1)
    ]


def _text(text: str) -> list[dict[str, str]]:
    """No part without text: a picture may be all that is said."""
    return [{"type": "text", "text": text}] if text.strip() else []
