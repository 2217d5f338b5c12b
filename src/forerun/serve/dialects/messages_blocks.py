"""The content blocks of Anthropic's Messages API, and its tools: what clients send, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from forerun.serve.routes.chat_messages import FunctionName
from forerun.serve.routes.strict import Several, Strict


class Cacheable(Strict):
    """Blocks and tools may ask for their place in a prompt cache to be kept."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cacheable):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Several[dict[str, Any]] | None = None


class TextSource(Strict):
    """A document that came as text."""

    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class OtherSource(Strict):
    """A document that came in a form nobody here can read."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["base64", "url", "file", "content"]


class DocumentBlock(Cacheable):
    """A document; those of plain text can be read."""

    type: Literal["document"]
    source: Annotated[TextSource | OtherSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class SearchResultBlock(Cacheable):
    """Something that a search of the client's own found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Several[TextBlock]
    citations: dict[str, Any] | None = None


class ImageData(Strict):
    """A picture inside the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageElsewhere(Strict):
    """A picture that the server would have to fetch: refused, with a message of its own."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["url", "file"]


class ImageBlock(Cacheable):
    """A picture."""

    type: Literal["image"]
    source: Annotated[ImageData | ImageElsewhere, Field(discriminator="type")]


class ToolReferenceBlock(Cacheable):
    """A tool that the client's own search for tools found."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(Cacheable):
    """What the model thought. Signatures are for those who made them."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Cacheable):
    """Thoughts that only another server can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cacheable):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


ResultContent = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]


class ToolResultBlock(Cacheable):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Several[ResultContent] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None


# Traces of tools and services that this server does not have; clients keep them in their history.
Foreign = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "advisor_tool_result",
    "fallback",
    "container_upload",
    "compaction",
]


class ForeignBlock(Cacheable):
    """Such a trace. Skipped, and named in a warning."""

    model_config = ConfigDict(extra="ignore")

    type: Foreign


class CustomTool(Cacheable):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    input_examples: Several[dict[str, Any]] | None = None
    allowed_callers: Several[str] | None = None


class ServerTool(Strict):
    """A tool of Anthropic's own, known by its type. Skipped, and named in a warning."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _tool_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom tool" if kind in (None, "custom") else "server tool"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom tool")] | Annotated[ServerTool, Tag("server tool")], Discriminator(_tool_tag)
]


class InlineTool(Strict):
    """A tool that a conversation brings along."""

    type: Literal["tool_definition"]
    definition: AnyTool


class ToolName(Strict):
    """A tool that is known already."""

    type: Literal["tool_reference"]
    name: str


class McpReference(Strict):
    """Tools of a server that only Anthropic's would talk to."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["mcp_tool_reference", "mcp_toolset_reference", "mcp_tool", "mcp_toolset"]


class ToolChangeBlock(Cacheable):
    """From here on there is a tool more, or one less."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[InlineTool | ToolName | McpReference, Field(discriminator="type")]


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | ToolChangeBlock
    | ForeignBlock,
    Field(discriminator="type"),
]
