"""Are messages of a conversation well formed? What is wrong is said in one line, with the message's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError
from forerun.text.content import MEDIA_KINDS, PLURALS

Message = Mapping[str, Any]  # role and content: text, or a list of text parts and media
ROLES = ("system", "user", "assistant", "tool", "developer")
_KEYS = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what a template could misread."""
    if not messages:
        raise ForerunError("there are no messages; give at least one")
    for number, message in enumerate(messages, start=1):
        unknown = sorted(str(key) for key in message if key not in _KEYS)
        if unknown:
            raise ForerunError(f"message {number} has an unknown key {unknown[0][:60]!r}")
        if message.get("role") not in ROLES:
            raise ForerunError(f"message {number} has an unknown role; use one of {', '.join(ROLES)}")
        _check_content(message, number)
        for key in ("reasoning_content", "tool_call_id", "name"):
            if message.get(key) is not None and not isinstance(message[key], str):
                raise ForerunError(f"message {number} must have text as its {key}")
        for call in message.get("tool_calls") or ():
            _check_call(call, number)


def _check_content(message: Mapping[str, Any], number: int) -> None:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        raise ForerunError(f"message {number} must have text as its content")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA_KINDS:
            if message["role"] != "user":
                raise ForerunError(f"message {number} is not the user's, so it cannot have {PLURALS[kind]}")
            if len(part) > 1:
                raise ForerunError(f"message {number} has {kind} data where only its place belongs")
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise ForerunError(f"message {number} has a part that is neither text nor {', '.join(MEDIA_KINDS)}")


def _check_call(call: Any, number: int) -> None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ForerunError(f"message {number} has a tool call without the name of a function")
    if not isinstance(function.get("arguments") or {}, Mapping):
        raise ForerunError(f"message {number} has a tool call whose arguments are not an object")
