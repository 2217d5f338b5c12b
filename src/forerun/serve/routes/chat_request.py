"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from forerun.serve.chat_job import ChatJob, ThinkingWish, Tool, ToolChoice
from forerun.serve.dialects.conversation import check_choice, check_names
from forerun.serve.dialects.fields import LARGEST, Limit, limit
from forerun.serve.dialects.notes import Notes
from forerun.serve.effort import Effort, switched, thinking_for
from forerun.serve.errors import bad_request
from forerun.serve.routes.chat_messages import MAX_MESSAGES, ChatMessage, FunctionName
from forerun.serve.routes.media_parts import ImagePart
from forerun.serve.routes.openai_fields import MAX_TOP_LOGPROBS, GenerationFields
from forerun.serve.routes.strict import Json, Several, Strict
from forerun.serve.sent_media import SentMedia

MAX_TOOLS = 512
Budget = Annotated[int, Field(ge=0, le=LARGEST)]


class FunctionDefinition(Strict):
    """A tool's definition."""

    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=100_000)] | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class ChatFunctionTool(Strict):
    """Functions are the only tools that a model on its own can call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """By its name."""

    name: FunctionName


class NamedToolChoice(Strict):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


class OpenRouterReasoning(Strict):
    """OpenRouter's way to say how much is thought."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    summary: str | None = None


class ChatRequest(GenerationFields):
    """OpenAI's fields, and what vLLM and llama.cpp added."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: Annotated[Several[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[Several[ChatFunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionName | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: OpenRouterReasoning | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    chat_template_kwargs: Annotated[dict[str, Json], Field(max_length=50)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    modalities: Several[Literal["text"]] | None = None

    def job(self) -> ChatJob:
        """For the pipeline."""
        self._check()
        options = dict(self.chat_template_kwargs or {})
        thinking = self._thinking(options)
        media: list[SentMedia] = []
        tools = [_tool(tool.function) for tool in self.tools or ()]
        check_names(tools)
        messages = [message.template_form(number, media) for number, message in enumerate(self.messages)]
        return ChatJob(
            messages=messages,
            media=tuple(media),
            wish=self.wish(
                max_tokens=limit(self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens),
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            tools=tools,
            tool_choice=self._tool_choice(tools),
            thinking=thinking,
            template_options=options,
            continue_last=bool(self.continue_final_message),
            new_turn=self.add_generation_prompt is not False,
        )

    def note_unused(self, notes: Notes) -> None:
        """Of two limits the newer one holds, and pictures are always read as their model reads them."""
        super().note_unused(notes)
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            notes.unused("max_tokens")
        if self.reasoning is not None:
            notes.fields(self.reasoning, "exclude", "summary", under="reasoning.")
        contents = (message.content for message in self.messages if not isinstance(message.content, str | None))
        pictures = [part for parts in contents for part in parts if isinstance(part, ImagePart)]
        if any(part.image_url.detail not in (None, "auto") for part in pictures):
            notes.unused("image_url.detail")

    def _check(self) -> None:
        """Combinations that make no sense."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                raise bad_request("Only a last message of the assistant can be continued.", "continue_final_message")
            if self.add_generation_prompt:
                raise bad_request("A message is continued or a new one begun, not both.", "add_generation_prompt")
        elif self.echo:
            raise bad_request("'echo' needs 'continue_final_message' in a chat.", "echo")

    def _tool_choice(self, tools: Sequence[Tool]) -> ToolChoice:
        parallel, wanted = self.parallel_tool_calls is not False, self.tool_choice
        if wanted is None or wanted == "auto":
            choice = ToolChoice("auto", parallel=parallel)
        elif wanted == "none":
            choice = ToolChoice("none", parallel=parallel)
        elif wanted == "required":
            choice = ToolChoice("required", parallel=parallel)
        else:
            choice = ToolChoice("named", wanted if isinstance(wanted, str) else wanted.function.name, parallel)
        return check_choice(choice, tools)

    def _thinking(self, options: dict[str, Any]) -> ThinkingWish:
        """From any of the fields that say so; `enable_thinking` is taken out of the template's options."""
        inner = self.reasoning or OpenRouterReasoning()
        thinking = thinking_for(self.reasoning_effort or inner.effort)
        if inner.enabled is not None and thinking.enabled is None:
            thinking = replace(thinking, enabled=inner.enabled)
        thinking = switched(thinking, options)
        given = (self.thinking_budget, self.thinking_token_budget, inner.max_tokens)
        budgets = {budget for budget in given if budget is not None}
        if len(budgets) > 1:
            raise bad_request("The budgets for thinking differ.", "thinking_token_budget")
        return replace(thinking, budget=budgets.pop()) if budgets else thinking


def _tool(function: FunctionDefinition) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict))
