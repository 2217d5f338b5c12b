"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from forerun.serve.completion_service import CompletionJob
from forerun.serve.dialects.fields import Id, Limit, limit
from forerun.serve.errors import bad_request
from forerun.serve.routes.openai_fields import MAX_TOP_LOGPROBS, GenerationFields
from forerun.serve.routes.strict import Several

MAX_PROMPTS = 2048
MAX_IDS = 4_000_000
DEFAULT_MAX_TOKENS = 16  # OpenAI's

Ids = Annotated[Several[Id], Field(min_length=1, max_length=MAX_IDS)]


class CompletionRequest(GenerationFields):
    """OpenAI's fields, and what vLLM and llama.cpp added."""

    model_config = ConfigDict(title="CompletionRequest")

    prompt: (
        str
        | Ids
        | Annotated[Several[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[Several[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    suffix: str | None = None
    max_tokens: Limit | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def job(self) -> CompletionJob:
        """For the pipeline."""
        if self.best_of is not None and self.best_of != (self.n or 1):  # the best n of n are all of them
            raise bad_request("'best_of' is not supported: ask for 'n' choices.", "best_of")
        if self.suffix is not None and self.echo:
            raise bad_request("'echo' and 'suffix' do not go together.", "echo")
        most = DEFAULT_MAX_TOKENS if self.max_tokens is None else limit(self.max_tokens)
        return CompletionJob(
            prompts=self._prompts(),
            suffix=self.suffix,
            echo=bool(self.echo),
            wish=self.wish(max_tokens=most, logprobs=self.logprobs),
        )

    def _prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [part for part in prompt if not isinstance(part, int)]
