"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from forerun.serve.chat_job import ChatJob, Thinking, Tool, ToolChoice
from forerun.serve.effort import Effort, thinking_for
from forerun.serve.errors import bad_request
from forerun.serve.routes.chat_messages import MAX_MESSAGES, FunctionName, Message
from forerun.serve.routes.media_parts import ImagePart
from forerun.serve.routes.openai_fields import LARGEST, MAX_TOP_LOGPROBS, GenerationFields
from forerun.serve.routes.strict import Strict
from forerun.serve.sent_media import SentMedia
from forerun.serve.several import Several

MAX_TOOLS = 512
Budget = Annotated[int, Field(ge=0, le=LARGEST)]


class Function(Strict):
    """A tool's definition."""

    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=100_000)] | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """Functions are the only tools that a model on its own can call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """By its name."""

    name: FunctionName


class NamedTool(Strict):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationFields):
    """OpenAI's fields, and what vLLM and llama.cpp added."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: Annotated[Several[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[Several[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionName | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=50)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    modalities: Several[Literal["text"]] | None = None

    def job(self, request_id: str | None) -> ChatJob:
        """For the pipeline."""
        self.check()
        options = dict(self.chat_template_kwargs or {})
        thinking = self._thinking(options)
        media: list[SentMedia] = []
        messages = [message.template_form(number, media) for number, message in enumerate(self.messages)]
        return ChatJob(
            messages=messages,
            media=tuple(media),
            wish=self.wish(
                max_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            tools=[_tool(tool.function) for tool in self.tools or ()],
            tool_choice=self._tool_choice(),
            thinking=thinking,
            template_options=options,
            continue_last=bool(self.continue_final_message),
            request_id=request_id,
        )

    def warnings(self) -> Iterator[str]:
        """What was sent and changes nothing: pictures are always read as their model reads them."""
        yield from super().warnings()
        contents = (message.content for message in self.messages if not isinstance(message.content, str | None))
        pictures = [part for parts in contents for part in parts if isinstance(part, ImagePart)]
        if any(part.image_url.detail not in (None, "auto") for part in pictures):
            yield "without effect: image_url.detail"

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                raise bad_request("Only a last message of the assistant can be continued.", "continue_final_message")
            if self.add_generation_prompt:
                raise bad_request("A message is continued or a new one begun, not both.", "add_generation_prompt")
        elif self.add_generation_prompt is False:
            raise bad_request(
                "An answer needs its turn begun; continue_final_message goes on with the last message.",
                "add_generation_prompt",
            )
        elif self.echo:
            raise bad_request("'echo' needs 'continue_final_message' in a chat.", "echo")

    def _tool_choice(self) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise bad_request("Two tools have the same name.", "tools")
        if choice is None:
            return ToolChoice("auto" if names else "none", parallel=parallel)
        if choice in ("none", "auto"):
            return ToolChoice("auto" if names and choice == "auto" else "none", parallel=parallel)
        if not names:
            raise bad_request("'tool_choice' needs 'tools'.", "tool_choice")
        if choice == "required":
            return ToolChoice("required", parallel=parallel)
        name = choice if isinstance(choice, str) else choice.function.name
        if name not in names:
            raise bad_request(f"'tool_choice' names '{name}', which is none of the tools.", "tool_choice")
        return ToolChoice("named", name, parallel)

    def _thinking(self, options: dict[str, Any]) -> Thinking:
        """From any of the fields that say so; `enable_thinking` is taken out of the template's options."""
        thinking = thinking_for(self.reasoning_effort)
        enabled = options.pop("enable_thinking", thinking.enabled)
        if not isinstance(enabled, bool | None):
            raise bad_request("'enable_thinking' must be true or false.", "chat_template_kwargs")
        budgets = {b for b in (self.thinking_budget, self.thinking_token_budget) if b is not None}
        if len(budgets) > 1:
            raise bad_request("'thinking_budget' and 'thinking_token_budget' differ.", "thinking_token_budget")
        return Thinking(enabled, budgets.pop() if budgets else thinking.budget)


def _tool(function: Function) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
