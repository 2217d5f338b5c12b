"""The chat pipeline: a job becomes a prompt, the prompt answers, the answers events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from forerun.errors import ForerunError
from forerun.media.parts import MediaPrompt
from forerun.sample.constraint import Constraint
from forerun.serve.chat_job import ChatJob, ThinkingWish, Tool
from forerun.serve.chat_run import EngineChatRun, start_run
from forerun.serve.constraining import callable_tools, chat_constraints, chat_grammar, check_tools, is_free
from forerun.serve.effort import Effort, thinking_for
from forerun.serve.errors import bad_request, try_later
from forerun.serve.generation import PromptToRun, check_characters, check_limits, grammar_limits
from forerun.serve.media_reading import MediaReading, checked
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.off_loop import OffLoop
from forerun.serve.parsing.make import make_parser
from forerun.serve.settings import ServeSettings
from forerun.text.chat import ChatPrompt, chat_template, encode_chat
from forerun.text.guarded import strings_in
from forerun.text.template import check_options

DEFAULTS: dict[str, Effort | None] = {"auto": None, "off": "none"}  # of --reasoning; others are efforts
NO_THINKING = "This model does not think: what was asked of its thinking has no effect."


class ChatPipeline:
    """The `ChatService` of a server."""

    def __init__(self, models: ModelService, settings: ServeSettings, off_loop: OffLoop) -> None:
        self.model = models.name
        self._models, self._settings, self._off_loop = models, settings, off_loop
        self._media = MediaReading(settings)
        self._thinking = thinking_for(DEFAULTS.get(settings.reasoning, cast(Effort, settings.reasoning)))

    async def start(self, job: ChatJob) -> EngineChatRun:
        """Queue a chat."""
        model = self._models.loaded()
        check_limits(job.wish, self._settings)
        warnings = _warnings(model, job)
        job = self._with_defaults(job)
        prompt = await self.prompt(job)
        constraints = await self._constraints(model, job, prompt)
        read = await self._read_media(model, job, prompt)  # last, since it takes longest
        tools = callable_tools(job)
        to_run = PromptToRun(
            prompt.ids if read is None else read.ids,
            prompt.text,
            constraints,
            shown=model.format.shown,
            media=None if read is None else read.media,
            written=prompt.ids,
            parser=lambda: make_parser(model.format, tools, thinking_open=prompt.thinking_open),
        )
        return await start_run(self._models, model, job.wish, [to_run], job.param, warnings)

    def _with_defaults(self, job: ChatJob) -> ChatJob:
        """With the server's word on thinking, where the request says nothing about it."""
        return job if job.thinking != ThinkingWish() else replace(job, thinking=self._thinking)

    async def _constraints(self, model: LoadedModel, job: ChatJob, prompt: ChatPrompt) -> Sequence[Constraint | None]:
        if is_free(job):
            return ()
        limits = grammar_limits(self._settings)

        def build() -> Sequence[Constraint | None]:
            return chat_constraints(model, job, chat_grammar(model, job, limits), prompt.thinking_open)

        output = job.wish.output
        param = output.param if output else "thinking_budget"
        return await self._off_loop.run(build, "tools" if callable_tools(job) else param)

    async def count_tokens(self, job: ChatJob) -> int:
        """Of the prompt, template and media included."""
        prompt = await self.prompt(job)
        if not job.media:
            return len(prompt.ids)
        return await self._media.count(checked(self._models.loaded().media, job.media), prompt.ids, job.media)

    async def _read_media(self, model: LoadedModel, job: ChatJob, prompt: ChatPrompt) -> MediaPrompt | None:
        """Once for all choices; not for an answer that would be turned away afterwards."""
        if not job.media:
            return None
        if self._models.state().waiting >= self._settings.max_queue:
            raise try_later(429, "Too many answers are waiting already: try again later.", "queue_full")
        return await self._media.read(checked(model.media, job.media), prompt.ids, job.media)

    async def end(self) -> None:
        """End its threads."""
        await self._media.end()

    async def prompt(self, job: ChatJob) -> ChatPrompt:
        """What the model's template makes of the conversation; media have one placeholder each."""
        model = self._models.loaded()
        job = self._with_defaults(job)
        if job.media:
            checked(model.media, job.media)
        seconds = self._settings.template_timeout
        return await self._off_loop.run(lambda: _encode(model, job, seconds), job.param)


def _encode(model: LoadedModel, job: ChatJob, seconds: float) -> ChatPrompt:
    check_tools(job.tools)
    tools = [_function(tool) for tool in callable_tools(job)]
    for given, param in ((job.messages, job.param), (tools, "tools")):
        check_characters(model, sum(map(len, strings_in(given))), param)
    options = dict(job.template_options)
    switch = model.format.thinking_switch
    if switch is not None and job.thinking.enabled is not None:
        options[switch] = job.thinking.enabled
    try:
        check_options(options, chat_template(model.tokenizer, with_tools=bool(tools)))
    except ForerunError as error:
        raise bad_request(str(error), "chat_template_kwargs" if options else job.param) from error
    return encode_chat(
        model.tokenizer,
        job.messages,
        tools=tools or None,
        template_options=options,
        continue_last=job.continue_last,
        new_turn=job.new_turn,
        seconds=seconds,
    )


def _function(tool: Tool) -> dict[str, Any]:
    """OpenAI's form, which templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _warnings(model: LoadedModel, job: ChatJob) -> list[str]:
    asked = job.thinking.enabled or job.thinking.budget is not None
    return [NO_THINKING] if asked and model.format.reasoning == "none" else []
