"""The body of a request to /v1/messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from forerun.serve.dialects.fields import Extras, StopString
from forerun.serve.dialects.messages_blocks import AnyBlock, AnyTool, TextBlock
from forerun.serve.routes.strict import Several, Strict

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TurnOptions(Strict):
    """How hard to try from this message on."""

    effort: Effort | None = None
    timing: dict[str, Any] | None = None


class AnthropicMessage(Strict):
    """One message. The last two fields belong to messages of the system."""

    role: Literal["user", "assistant", "system"]
    content: str | Several[AnyBlock] = ""
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOptions | None = None


class ThinkingOptions(Strict):
    """Whether the model thinks first; `adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None


class ToolChoiceOptions(Strict):
    """May it call tools, must it, and which?"""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonOutputFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(TurnOptions):
    """How hard to try, and what the answer must look like."""

    format: JsonOutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class CountRequest(Extras):
    """What decides the prompt, and so its number of tokens.

    Claude Code sends new fields with every other release; they are kept apart (`model_extra`), to be named or refused.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    model: str
    messages: Several[AnthropicMessage] = Field(min_length=1)
    system: str | Several[TextBlock] | None = None
    tools: Several[AnyTool] | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Several[dict[str, Any]] | None = None
    speed: str | None = None
    thread: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """All of a request; what it may name and this server does not have is told apart in `messages_job`."""

    model_config = ConfigDict(
        json_schema_extra={
            "additionalProperties": False,
            "examples": [{"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}],
        }
    )

    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    stop_sequences: Several[StopString] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: str | dict[str, Any] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    fallbacks: Several[dict[str, Any]] | str | None = None
    safeguards: Any = None
