"""Text completions: prompts as they are, several at once, with their own log probabilities where asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forerun.media.reading import check_no_places
from forerun.sample.grammar import Grammar
from forerun.serve.chat_events import TokenInfo
from forerun.serve.chat_job import GenerationWish
from forerun.serve.chat_run import EngineChatRun, start_run
from forerun.serve.choice import likeliest
from forerun.serve.constraining import output_grammar, text_constraints
from forerun.serve.errors import bad_request
from forerun.serve.generation import PromptToRun, check_characters, check_limits, grammar_limits
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.off_loop import OffLoop
from forerun.serve.settings import ServeSettings
from forerun.text.chat import encode_prompt
from forerun.text.fim import encode_fim

CompletionPrompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob:
    """Texts or token ids to go on with."""

    prompts: Sequence[CompletionPrompt]
    suffix: str | None = None  # what comes after the gap to be filled
    echo: bool = False
    wish: GenerationWish


@dataclass(frozen=True, slots=True)
class CompletionRun:
    """Choices in the order of the prompts, `n` of each; what the prompts say, for echo."""

    run: EngineChatRun
    prompts: Sequence[PromptToRun]
    model: LoadedModel

    def prompt_text(self, choice: int) -> str:
        """What a choice goes on with."""
        return self._prompt(choice).text

    def prompt_tokens(self, choice: int) -> list[TokenInfo]:
        """The prompt of a choice, token by token; from the first event on with log probabilities, if asked for."""
        first, *others = (
            TokenInfo(token, *self.model.token_bytes.of(token), arm="prompt", round=0)
            for token in self._prompt(choice).ids
        )
        logprobs = self.run.choices[choice].answer.prompt_logprobs
        if not logprobs:
            return [first, *others]
        pairs = zip(others, logprobs, strict=True)  # nothing comes before the first token
        texts = self.model.token_bytes
        return [first, *(replace(token, logprob=p.value, top=likeliest(p, texts)) for token, p in pairs)]

    def _prompt(self, choice: int) -> PromptToRun:
        return self.prompts[choice * len(self.prompts) // len(self.run.choices)]


class CompletionPipeline:
    """Starts them. What is wrong with a job is an `ApiError` before the first event."""

    def __init__(self, models: ModelService, settings: ServeSettings, off_loop: OffLoop) -> None:
        self._models, self._settings, self._off_loop = models, settings, off_loop

    async def start(self, job: CompletionJob) -> CompletionRun:
        """Queue all choices of all prompts, or none."""
        model = self._models.loaded()
        check_limits(job.wish, self._settings)
        if len(job.prompts) * job.wish.n > self._settings.max_queue:
            raise bad_request("These are more prompts and choices than the server's queue holds.", "prompt")
        limits = grammar_limits(self._settings)
        output = job.wish.output
        param = output.param if output else "response_format"
        grammar = await self._off_loop.run(lambda: output_grammar(model, output, limits), param)
        prompts = await self._off_loop.run(
            lambda: [_encode(model, prompt, job, grammar) for prompt in job.prompts],
            "prompt" if job.suffix is None else "suffix",
        )
        return CompletionRun(await start_run(self._models, model, job.wish, prompts, "prompt"), prompts, model)


def _encode(model: LoadedModel, prompt: CompletionPrompt, job: CompletionJob, grammar: Grammar | None) -> PromptToRun:
    if isinstance(prompt, str):
        check_characters(model, len(prompt) + len(job.suffix or ""), "prompt")
    if job.suffix is None:
        ids = encode_prompt(model.tokenizer, prompt, raw=True)
    elif isinstance(prompt, str):
        ids = encode_fim(model.tokenizer, prompt, job.suffix)
    else:
        raise bad_request("With a suffix the prompt must be text.", "prompt")
    check_no_places(model.media, ids)
    text = prompt if isinstance(prompt, str) else str(model.tokenizer.decode(ids))
    constraints = text_constraints(model, job.wish, grammar)
    return PromptToRun(ids, text, constraints, logprobs=job.echo and job.wish.logprobs is not None)
