"""The chat pipeline: a job becomes a prompt, the prompt answers, the answers events."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.serve.answer_reader import AnswerReader, PlainText
from forerun.serve.chat_job import ChatJob
from forerun.serve.chat_run import Choice, Run
from forerun.serve.generation import PromptToRun, check_characters, check_limits, make_work, sink_of
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.off_loop import OffLoop
from forerun.serve.settings import ServeSettings
from forerun.text.chat import encode_prompt


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready for the model."""

    ids: list[int]
    text: str


class ChatPipeline:
    """The `ChatService` of a server."""

    def __init__(self, models: ModelService, settings: ServeSettings, off_loop: OffLoop) -> None:
        self.model = models.name
        self._models, self._settings, self._off_loop = models, settings, off_loop

    async def start(self, job: ChatJob) -> Run:
        """Queue a chat."""
        model = self._models.loaded()
        check_limits(job.wish, self._settings)
        prompt = await self.prompt(job)
        work = make_work(model, job.wish, PromptToRun(prompt.ids, prompt.text), "messages")
        answers = await self._models.engine.start(work)
        choices = [
            Choice(answer, sink_of(item), AnswerReader(index, PlainText(), model.token_bytes))
            for index, (answer, item) in enumerate(zip(answers, work, strict=True))
        ]
        return Run(self.model, len(prompt.ids), choices)

    async def count_tokens(self, job: ChatJob) -> int:
        """Of the prompt, template included."""
        return len((await self.prompt(job)).ids)

    async def prompt(self, job: ChatJob) -> ChatPrompt:
        """What the model's template makes of the conversation."""
        model = self._models.loaded()
        check_characters(model, sum(len(str(message.get("content"))) for message in job.messages), "messages")
        return await self._off_loop.run(lambda: _encode(model, job), "messages")


def _encode(model: LoadedModel, job: ChatJob) -> ChatPrompt:
    messages = [{"role": message["role"], "content": message["content"]} for message in job.messages]
    tokens = encode_prompt(model.tokenizer, messages)
    return ChatPrompt(tokens, "\n".join(message["content"] for message in messages))
