"""The body of a request to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from forerun.serve.dialects.fields import Extras, Limit, StopString
from forerun.serve.dialects.responses_items import AnyItem, AnyTool
from forerun.serve.effort import Effort
from forerun.serve.routes.strict import Several, Strict


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    """What the text of the answer is like."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """How much the model thinks, and in which form a client gets to read it."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None


class ResponsesStreamOptions(Strict):
    """Of a stream."""

    include_obfuscation: bool | None = None
    reasoning_summary_delivery: str | None = None


class ToolChoiceFunction(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """Only these of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Several[dict[str, Any]]


class InputTokensRequest(Extras):
    """What decides the prompt, and so its number of tokens."""

    model: str | None = None
    input: str | Several[AnyItem] | None = None
    instructions: str | None = None
    tools: Several[AnyTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ToolChoiceFunction | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None


class ResponsesRequest(InputTokensRequest):
    """All of a request; what it may name and this server does not have is told apart in `responses_job`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": "Why is the sky blue?", "stream": True}]})

    max_output_tokens: Limit | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stop: StopString | Several[StopString] | None = None
    thinking_budget: int | None = Field(default=None, ge=0, lt=2**31)
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    return_progress: bool | None = None
    include: Several[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    client_metadata: dict[str, Any] | None = None
