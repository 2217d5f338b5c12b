"""Tokens in, tokens out: POST /inference/v1/generate under vLLM's names, /abort_requests, and requests as tokens.

For trainers, evaluations and front ends that tokenize elsewhere. Tokens and their log probabilities are those of plain
decoding, and the token that ended an answer is the last of its `token_ids`, with its log probability: a policy has
chosen that one too.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, FiniteFloat, StringConstraints

from forerun.engine.sequence import Logprob
from forerun.serve.chat_events import ChatEvent, Delta, Finished, Summary, TokenInfo, Usage
from forerun.serve.chat_job import OutputFormat
from forerun.serve.chat_service import ChatPipeline
from forerun.serve.choice import likeliest
from forerun.serve.completion_service import CompletionJob, CompletionPipeline, CompletionRun
from forerun.serve.dialects.fields import LARGEST, Id, SamplingFields, StopString
from forerun.serve.dialects.transport import EventEncoder, Json, respond
from forerun.serve.error_bodies import openai_body
from forerun.serve.errors import ApiError, bad_request
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.chunks import usage_body
from forerun.serve.routes.completion_request import MAX_IDS, CompletionRequest
from forerun.serve.routes.openai_fields import MAX_TOP_LOGPROBS, GenerationFields, Name
from forerun.serve.routes.output_fields import OutputFields, StructuredOutputs
from forerun.serve.routes.strict import Several, Strict
from forerun.serve.settings import ServeSettings
from forerun.serve.sse import DONE, unless_gone
from forerun.text.chat import encode_prompt

DEFAULT_MAX_TOKENS = 16  # vLLM's
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class GenerateSamplingParams(SamplingFields):
    """vLLM's object of this name, as far as it concerns choosing tokens."""

    n: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    stop: StopString | Annotated[Several[StopString], Field(max_length=1000)] | None = None
    include_stop_str_in_output: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool | None = None  # what these three say makes no difference to tokens
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    def job(self, prompt: Sequence[int]) -> CompletionJob:
        """For the pipeline."""
        asked = [value for value in (self.logprobs, self.prompt_logprobs) if value is not None]
        return CompletionJob(
            prompts=[prompt],
            echo=self.prompt_logprobs is not None,
            wish=self.wish(
                stop=self.stop,
                include_stop=bool(self.include_stop_str_in_output),
                n=self.n or 1,
                max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
                logprobs=max(asked) if asked else None,
                output=OutputFields(structured_outputs=self.structured_outputs).output(),
            ),
        )


class GenerateStreamOptions(Strict):
    """Of `stream_options`."""

    include_usage: bool | None = None


class GenerateRequest(Strict):
    """vLLM's body. What belongs to other machines' caches is not taken."""

    token_ids: Annotated[Several[Id], Field(min_length=1, max_length=MAX_IDS)]
    sampling_params: GenerateSamplingParams = Field(default_factory=GenerateSamplingParams)
    request_id: RequestId | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: GenerateStreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    priority: Literal[0] | None = None


class AbortRequest(Strict):
    """Which answers to end."""

    request_ids: Annotated[Several[RequestId], Field(max_length=10_000)]


class AbortableRun:
    """A `ChatRun` that others may end by its name; what it said until then is its answer."""

    def __init__(self, completion: CompletionRun, name: str, known: dict[str, set[AbortableRun]]) -> None:
        run = completion.run
        self.completion, self.name, self._run, self._known = completion, name, run, known
        self.id, self.created, self.model, self.prompt_tokens = run.id, run.created, run.model, run.prompt_tokens
        self._aborted = False
        known.setdefault(name, set()).add(self)

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        finished: set[int] = set()
        try:
            async for event in self._run:
                if isinstance(event, Finished):
                    finished.add(event.choice)
                yield event
        except ApiError:
            if not self._aborted:
                raise
            for choice in range(len(self._run.choices)):
                if choice not in finished:
                    yield Finished(choice, "length")
            yield Summary(Usage(self.prompt_tokens, 0))

    async def abort(self) -> None:
        """End it here."""
        self._aborted = True
        await self._run.close()

    async def close(self) -> None:
        """Its client has it all, or wants no more."""
        others = self._known.get(self.name)
        if others is not None:
            others.discard(self)
            if not others:
                del self._known[self.name]
        await self._run.close()


class TokensEncoder(EventEncoder):
    """Events as token ids."""

    last_line = DONE

    def __init__(self, run: AbortableRun, body: GenerateRequest) -> None:
        params, self._run, self._body = body.sampling_params, run, body
        self._top, self._prompt_top = params.logprobs, params.prompt_logprobs
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._parts: list[Json] = [
            {"index": index, "token_ids": [], "logprobs": None if self._top is None else {"content": []}, "text": ""}
            for index in range(len(run.completion.run.choices))
        ]
        self.answer: Json = {}

    def start(self) -> Iterable[Json]:
        """Nothing before the first token."""
        return ()

    def events(self, event: ChatEvent) -> Iterable[Json]:
        """A chunk for what a choice said, and one for how it ended."""
        if isinstance(event, Delta):
            if event.tokens or event.content:
                yield self._chunk(event.choice, event.tokens, event.content)
        elif isinstance(event, Finished):
            ended = self._run.completion.run.choices[event.choice].ended
            last: list[TokenInfo] = []
            if ended is not None and ended.stop is not None:
                last = [stop_token(ended.stop, ended.stop_logprob, self._run.completion.model)]
            chunk = self._chunk(event.choice, last, "")
            how = {"finish_reason": "abort" if ended is None else event.reason, "stop_reason": event.stop}
            chunk["choices"][0] |= how
            self._parts[event.choice] |= how
            yield chunk
        elif isinstance(event, Summary):
            yield from self._end(event)

    def _chunk(self, choice: int, tokens: Sequence[TokenInfo], text: str) -> Json:
        said: Json = {"token_ids": [token.id for token in tokens], "text": text}
        whole = self._parts[choice]
        whole["token_ids"] += said["token_ids"]
        whole["text"] += text
        said["logprobs"] = None
        if self._top is not None:
            entries = [self._entry(token) for token in tokens]
            said["logprobs"] = {"content": entries}
            whole["logprobs"]["content"] += entries
        return self._head() | {"choices": [{"index": choice, "finish_reason": None} | self._shown(said)]}

    def _entry(self, token: TokenInfo) -> Json:
        assert self._top is not None
        top = [self._named(*one) for one in token.top[: self._top]]
        return self._named(token.id, token.text, token.data, token.logprob) | {"top_logprobs": top}

    def _named(self, token: int, text: str, data: bytes, value: float | None) -> Json:
        if self._body.output_mode == "text":
            return {"token": text, "logprob": value, "bytes": list(data), "token_id": token}
        return {"token": f"token_id:{token}", "logprob": value, "bytes": None, "token_id": token}

    def _shown(self, part: Json) -> Json:
        return part if self._body.output_mode == "text" else {k: v for k, v in part.items() if k != "text"}

    def _head(self) -> Json:
        return {"request_id": self._run.name, "output_mode": self._body.output_mode}

    def _end(self, summary: Summary) -> Iterable[Json]:
        told = sum(len(part["token_ids"]) for part in self._parts)
        usage = usage_body(Usage(self._run.prompt_tokens, told, cached=summary.usage.cached))
        self.answer = self._head() | {
            "choices": [self._shown(part) for part in self._parts],
            "prompt_logprobs": self._prompt_logprobs(),
            "usage": usage,
            **summary.statistics,
        }
        if self._usage:
            yield self._head() | {"choices": [], "usage": usage, **summary.statistics}

    def _prompt_logprobs(self) -> list[Json | None] | None:
        if self._prompt_top is None:
            return None
        first, *others = self._run.completion.prompt_tokens(0)
        assert first.logprob is None, "nothing comes before it"
        return [None, *(self._rated(token, self._prompt_top) for token in others)]

    def _rated(self, token: TokenInfo, top: int) -> Json:
        """By token id: the prompt's own token, and the likeliest."""
        best = {str(one): {"logprob": value} for one, _, _, value in token.top[:top]}
        return {str(token.id): {"logprob": token.logprob}} | best

    def failed(self, error: ApiError) -> Json:
        """OpenAI's form, as vLLM's."""
        return openai_body(error)


def stop_token(token: int, logprob: Logprob | None, model: LoadedModel) -> TokenInfo:
    """It says nothing, but it was chosen."""
    text, data = model.token_bytes.of(token)
    top = [] if logprob is None else likeliest(logprob, model.token_bytes)
    return TokenInfo(token, text, data, "model", 0, None if logprob is None else logprob.value, top)


def router(chats: ChatPipeline, texts: CompletionPipeline, models: ModelService, settings: ServeSettings) -> APIRouter:
    """For programs that think in tokens."""
    routes = APIRouter(tags=["tokens"])
    known: dict[str, set[AbortableRun]] = {}  # under way, by the name of the request

    @routes.post("/inference/v1/generate", response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Go on with token ids; the answer is token ids."""
        models.check_name(body.model)
        if body.stream and body.sampling_params.prompt_logprobs is not None:
            raise bad_request("'prompt_logprobs' come with whole answers only.", "sampling_params.prompt_logprobs")
        job = body.sampling_params.job(body.token_ids)
        completion = await unless_gone(request, texts.start(job), lambda started: started.run.close())
        run = AbortableRun(completion, body.request_id or uuid.uuid4().hex, known)
        encoder = TokensEncoder(run, body)
        return await respond(request, run, encoder, {}, stream=body.stream, ping=settings.ping)

    @routes.post("/abort_requests", response_model=None)
    async def abort_requests(body: AbortRequest) -> Response:
        """End answers of /inference/v1/generate by their `request_id`; each has what was said until then."""
        for name in body.request_ids:
            for run in [*known.get(name, ())]:
                await run.abort()
        return Response(status_code=200)

    @routes.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest) -> Json:
        """The same request for /inference/v1/generate. Who parses the answer is the caller's affair."""
        models.check_name(body.model)
        job = body.job()
        if job.media:
            raise bad_request("Media cannot be rendered into tokens.", job.media[0].param)
        prompt = await chats.prompt(job)
        wish = job.wish
        return rendered(body, prompt.ids, {"max_tokens": wish.max_tokens, "logprobs": wish.logprobs}, wish.output)

    @routes.post("/v1/completions/render")
    async def render_text(body: CompletionRequest) -> list[Json]:
        """One for each prompt."""
        models.check_name(body.model)
        job, model = body.job(), models.loaded()
        if job.suffix is not None:
            raise bad_request("A gap cannot be rendered: send it to /v1/completions.", "suffix")
        more = {"max_tokens": job.wish.max_tokens, "logprobs": job.wish.logprobs}
        ids = [encode_prompt(model.tokenizer, prompt, raw=True) for prompt in job.prompts]
        return [rendered(body, one, more, job.wish.output) for one in ids]

    return routes


def rendered(body: GenerationFields, ids: Sequence[int], more: Mapping[str, Any], output: OutputFormat | None) -> Json:
    """A `GenerateRequest`: fields of the same names, and those that have others there."""
    said = body.model_dump(exclude_none=True, by_alias=True)
    sampling = {name: said[name] for name in GenerateSamplingParams.model_fields if name in said and name not in more}
    sampling |= {name: value for name, value in more.items() if value is not None}
    if output is not None:
        kinds = {"json_schema": "json", "json_object": "json_object"}
        value = True if output.kind == "json_object" else output.value
        sampling["structured_outputs"] = {kinds.get(output.kind, output.kind): value}
    stream = {"stream": True} if body.stream else {}
    named = {} if body.model is None else {"model": body.model}
    return {"request_id": uuid.uuid4().hex, "token_ids": list(ids), "sampling_params": sampling, **named, **stream}
