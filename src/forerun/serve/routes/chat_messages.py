"""OpenAI's messages, checked, and in the form that chat templates take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from forerun.serve.dialects.conversation import read_arguments
from forerun.serve.errors import bad_request
from forerun.serve.routes.media_parts import AnyMediaPart, refuse_others
from forerun.serve.routes.strict import SentBack, Several, Strict
from forerun.serve.sent_media import SentMedia, place

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_CALLS = 128

CallId = Annotated[str, StringConstraints(max_length=200)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class TextPart(Strict):
    """Part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


ChatMessagePart = Annotated[TextPart | RefusalPart | AnyMediaPart, BeforeValidator(refuse_others)]
Text = str | Annotated[Several[ChatMessagePart], Field(max_length=MAX_PARTS)]


class CalledFunction(SentBack):
    """What the model called: a tool, or whatever it took for the name of one."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # the same once more, as OpenAI's client reads it


class ToolCall(SentBack):
    """A call of an earlier turn."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0, le=MAX_CALLS)] | None = None  # clients that keep deltas send it back


class ChatMessage(SentBack):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: Annotated[str, StringConstraints(max_length=200)] | None = None
    tool_calls: Annotated[Several[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None  # the content once more, as OpenAI's client reads it

    def template_form(self, number: int, media: list[SentMedia]) -> dict[str, Any]:
        """As templates know it; what it shows is added to `media`. `number` counts from 0, for errors."""
        where = f"messages[{number}]"
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise bad_request(f"A message of role '{self.role}' needs content.", f"{where}.content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning or self.refusal):
            raise bad_request("Only the assistant calls tools, reasons and refuses.", where)
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise bad_request("Messages of role 'tool', and only they, need a 'tool_call_id'.", f"{where}.tool_call_id")
        form: dict[str, Any] = {"role": self.role, "content": self._content(where, media) or self.refusal or ""}
        if self.name is not None:
            form["name"] = self.name
        if self.tool_call_id is not None:
            form["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            form["reasoning_content"] = reasoning
        if self.tool_calls:
            form["tool_calls"] = [_call(call, where) for call in self.tool_calls]
        return form

    def _content(self, where: str, media: list[SentMedia]) -> str | list[dict[str, str]]:
        """Text, or where there are media texts and places."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        parts = []
        for index, part in enumerate(self.content):
            if isinstance(part, TextPart | RefusalPart):
                parts.append({"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal})
            elif self.role == "user":
                media.append(part.sent(f"{where}.content[{index}]"))
                parts.append(place(media[-1]))
            else:
                raise bad_request("Media belong into messages of role 'user'.", f"{where}.content")
        return parts if any("text" not in part for part in parts) else "".join(part["text"] for part in parts)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates want arguments as an object."""
    arguments = read_arguments(call.function.arguments)
    if arguments is None:
        raise bad_request("The arguments of a tool call must be a JSON object, as text.", f"{where}.tool_calls")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
