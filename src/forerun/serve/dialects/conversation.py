"""A conversation as chat templates take it, put together from a dialect's blocks or items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from forerun.serve.chat_job import Tool, ToolChoice
from forerun.serve.errors import ApiError, bad_request
from forerun.serve.sent_media import SentMedia, place
from forerun.text.content import BETWEEN, in_parts, text_after


def unreadable(kind: str, param: str) -> ApiError:
    """Files and the like."""
    return bad_request(f"'{kind}' cannot be read here: send text or images instead.", param, "unsupported_media")


def only_users_show(param: str) -> ApiError:
    """Templates have places for media in turns of the user only."""
    return bad_request("Media belong into messages of the user.", param, "unsupported_media")


def read_arguments(text: str) -> dict[str, Any] | None:
    """A tool call's arguments, those of a call cut off by a length limit as far as they came; None: no object."""
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
        json.dumps(value, allow_nan=False)  # 1e999 is infinite once it is read, and cannot be written again
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def arguments_object(text: str) -> dict[str, Any]:
    """The same, and what is no object as the text it is."""
    arguments = read_arguments(text)
    return {"arguments": text} if arguments is None else arguments


class Conversation:
    """Messages in the order they are said. All that one side says in a row is one message: some templates insist."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media: list[SentMedia] = []  # one for each place in the messages
        self._names: dict[str, str] = {}  # of the tools, by the id of the call
        self._from_tools: list[SentMedia] = []  # what tools gave since the last turn
        self._open: dict[str, Any] = {}  # the message that was added to last
        self._texts: dict[str, list[str]] = {}  # for its fields; joined once, as one by one takes minutes

    def system(self, text: str) -> None:
        """Instructions. At the start they are one message: many templates know no second one there."""
        if not text:
            return
        self._show_results()
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._append(self.messages[0], "content", text)
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        """A user's turn, or more of it."""
        self._append(self._turn("user"), "content", text)

    def shows(self, media: SentMedia) -> None:
        """A picture of the user's, or the like."""
        turn = self._turn("user")
        self._join()
        turn["content"] = [*(in_parts(turn["content"]) if turn["content"] else ()), place(media)]
        self.media.append(media)

    def says(self, text: str) -> None:
        """Text of the assistant."""
        self._append(self._turn("assistant"), "content", text)

    def thinks(self, text: str) -> None:
        """Reasoning of the assistant."""
        if text:
            self._append(self._turn("assistant"), "reasoning_content", text)

    def calls(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> None:
        """A tool call of the assistant."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str, media: Sequence[SentMedia] = (), name: str = "") -> None:
        """What a tool gave. Some templates want to know which tool it was; `name`: where its call is not here.

        They have no places for media there: the user shows those, after all results.
        """
        self._from_tools += media
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._names.get(call_id, name)
        if name:
            message["name"] = name
        self.messages.append(message)

    @property
    def ends_with_text(self) -> bool:
        """Is the last message the beginning of an answer?"""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def end(self) -> None:
        """Nothing more comes: only now are the messages whole."""
        self._show_results()
        self._join()

    def _show_results(self) -> None:
        """What tools gave to look at, before a turn of its own."""
        waiting, self._from_tools = self._from_tools, []
        for media in waiting:
            self.shows(media)

    def _turn(self, role: str) -> dict[str, Any]:
        self._show_results()
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _append(self, message: dict[str, Any], key: str, text: str) -> None:
        if message is not self._open:
            self._join()
            self._open = message
        if text:
            self._texts.setdefault(key, []).append(text)

    def _join(self) -> None:
        for key, texts in self._texts.items():
            said = self._open.get(key)
            self._open[key] = text_after(said, texts) if said else BETWEEN.join(texts)
        self._texts = {}


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """A call that must be made needs a tool to make it with."""
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise bad_request(f"'tool_choice' names '{choice.name}', which is not among the tools.", "tool_choice")
    if choice.mode == "required" and not tools:
        raise bad_request("'tool_choice' asks for a tool call, but there are no tools to call.", "tool_choice")
    return choice


def check_names(tools: Iterable[Tool]) -> None:
    """Two tools of one name could not be told apart."""
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise bad_request(f"Two tools are called '{tool.name}'.", "tools")
        seen.add(tool.name)
