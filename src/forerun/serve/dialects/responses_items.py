"""The items of a Responses conversation, and the tools it may use: what clients send, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag

from forerun.serve.routes.chat_messages import FunctionName
from forerun.serve.routes.media_parts import AudioPart
from forerun.serve.routes.strict import SentBack, Several, Strict


class InputText(Strict):
    """Text of a message; answers come back with what they were sent with."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Several[dict[str, Any]] | None = None
    logprobs: Several[dict[str, Any]] | None = None


class Refusal(Strict):
    """What another model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class Image(Strict):
    """A picture, as a data URI. `detail` changes nothing."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class Video(Strict):
    """A video, as a data URI: not OpenAI's, but there should be a way."""

    type: Literal["input_video"]
    video_url: str


class Unreadable(Strict):
    """Files and the like: refused, with a message of their own."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_file", "computer_screenshot"]


Media = Image | AudioPart | Video
InputPart = Annotated[InputText | Refusal | Media | Unreadable, Field(discriminator="type")]


class Item(SentBack):
    """What every item may have. The server keeps no items, so that ids and states say nothing to it."""

    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A turn, or part of one."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Several[InputPart]
    phase: str | None = None


class FunctionCall(Item):
    """The model called a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class CustomToolCall(Item):
    """The model called a tool that takes free text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutput(Item):
    """What came of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Several[InputPart]
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class InputReasoning(Item):
    """What the model thought; the summary is all there is where a client asked for one."""

    type: Literal["reasoning"]
    summary: Several[InputText] = Field(default_factory=list)
    content: Several[InputText] | None = None
    encrypted_content: str | None = None


class FunctionTool(Strict):
    """A function, in the flat form of this API."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Several[str] | None = None


class OtherTool(Strict):
    """A tool that runs on the provider's side, or that takes free text. Skipped, and named in a warning."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


# Tags have two words each: errors leave them out when they name the field (`error_bodies`).
def _tool_tag(value: Any) -> str:
    kind = _kind(value)
    return f"{kind} tool" if kind in ("function", "namespace") else "other tool"


def _inner_tag(value: Any) -> str:
    return "function tool" if _kind(value) == "function" else "other tool"


class Namespace(Strict):
    """Functions under one roof; Codex sends the tools of MCP servers like this."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Several[
        Annotated[
            Annotated[FunctionTool, Tag("function tool")] | Annotated[OtherTool, Tag("other tool")],
            Discriminator(_inner_tag),
        ]
    ]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[Namespace, Tag("namespace tool")]
    | Annotated[OtherTool, Tag("other tool")],
    Discriminator(_tool_tag),
]


class AdditionalTools(Item):
    """More tools, as part of the conversation."""

    type: Literal["additional_tools"]
    role: str
    tools: Several[AnyTool]


# Traces of tools and services that this server does not have; clients keep them in their history.
Foreign = Literal[
    "web_search_call",
    "file_search_call",
    "tool_search_call",
    "tool_search_output",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "mcp_call",
    "compaction",
    "compaction_summary",
    "context_compaction",
]


class ForeignItem(Strict):
    """Such a trace."""

    model_config = ConfigDict(extra="ignore")

    type: Foreign


class ItemReference(Strict):
    """An item that a server should have kept; this one keeps none."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["item_reference"]


def _item_tag(value: Any) -> str:
    """Messages may come without a type."""
    kind = _kind(value)
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "call_output item"
    return "foreign item" if kind in get_args(Foreign) else f"{kind or 'message'} item"


AnyItem = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[FunctionCall, Tag("function_call item")]
    | Annotated[CustomToolCall, Tag("custom_tool_call item")]
    | Annotated[CallOutput, Tag("call_output item")]
    | Annotated[InputReasoning, Tag("reasoning item")]
    | Annotated[AdditionalTools, Tag("additional_tools item")]
    | Annotated[ForeignItem, Tag("foreign item")]
    | Annotated[ItemReference, Tag("item_reference item")],
    Discriminator(_item_tag),
]
