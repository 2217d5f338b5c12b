"""The chat pipeline: a job becomes a prompt, the prompt answers, the answers events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forerun.errors import ForerunError
from forerun.serve.answer_reader import AnswerReader, PlainText
from forerun.serve.chat_job import ChatJob
from forerun.serve.chat_run import Choice, Run
from forerun.serve.engine_client import Work
from forerun.serve.errors import ApiError, bad_request
from forerun.serve.generation import PromptToRun, check_limits, make_work
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.parsing.pieces import AnswerParser
from forerun.serve.settings import ServeSettings
from forerun.text.answer import AnswerText
from forerun.text.chat import encode_prompt
from forerun.text.token_bytes import TokenBytes

Result = TypeVar("Result")

ENCODERS = 2  # threads for templates, tokenizers and grammars: more would only take time from the engine


class ChatPipeline:
    """The `ChatService` of a server. Everything that takes long happens off the event loop."""

    def __init__(self, service: ModelService, settings: ServeSettings) -> None:
        self._service, self._settings = service, settings
        self.model = service.name
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="forerun encoder")

    async def start(self, job: ChatJob) -> Run:
        """Queue a chat."""
        model = self._service.loaded()
        check_limits(job.wish, self._settings)
        prompt = await self.off_loop(lambda: _encode(model, job))
        return await self.run(model, make_work(model, job.wish, prompt), len(prompt.tokens), _no_parser)

    async def count_tokens(self, job: ChatJob) -> int:
        """Of the prompt, template included."""
        model = self._service.loaded()
        return len((await self.off_loop(lambda: _encode(model, job))).tokens)

    async def run(
        self, model: LoadedModel, work: Sequence[Work], prompt_tokens: int, parser: Callable[[], AnswerParser]
    ) -> Run:
        """Hand work to the engine."""
        answers = await model.engine.start(work)
        token_bytes = TokenBytes(model.tokenizer)
        choices = []
        for index, (answer, item) in enumerate(zip(answers, work, strict=True)):
            assert isinstance(item.sink, AnswerText)
            choices.append(Choice(answer, item.sink, AnswerReader(index, parser(), token_bytes)))
        return Run(self.model, prompt_tokens, choices, self._settings.request_timeout)

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """On another thread, for a limited time; what is wrong with the input is the client's to know."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(
                loop.run_in_executor(self._encoders, work), timeout=self._settings.template_timeout
            )
        except TimeoutError:
            seconds = self._settings.template_timeout
            raise ApiError(400, f"Preparing the prompt took longer than {seconds:g} seconds.") from None
        except ForerunError as error:
            raise bad_request(str(error), "messages") from error


def _encode(model: LoadedModel, job: ChatJob) -> PromptToRun:
    messages = [{"role": message["role"], "content": message["content"]} for message in job.messages]
    tokens = encode_prompt(model.tokenizer, messages)
    return PromptToRun(tokens, "\n".join(message["content"] for message in messages))


def _no_parser() -> AnswerParser:
    return PlainText()
