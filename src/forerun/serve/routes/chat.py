"""POST /v1/chat/completions and its token count."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from forerun.serve.chat_events import ChatEvent, ChatRun, ChatService
from forerun.serve.dialects.transport import answer_stream, answer_whole, start
from forerun.serve.error_bodies import error_event
from forerun.serve.model_service import ModelService
from forerun.serve.request_ids import request_id
from forerun.serve.routes.chat_chunks import Chunks, Shape, whole
from forerun.serve.routes.chat_messages import joined
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.openai_fields import warning_header
from forerun.serve.settings import ServeSettings
from forerun.serve.sse import DONE, data_event


def router(chats: ChatService, models: ModelService, settings: ServeSettings, fingerprint: str) -> APIRouter:
    """OpenAI's chat completions."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        models.check_name(body.model)
        job = body.job(request_id(request))
        headers = warning_header(body.warnings())
        shape = Shape(
            fingerprint,
            include_usage=body.include_usage,
            logprobs=bool(body.logprobs),
            token_details=bool(body.return_token_details),
            echo=bool(body.echo),
        )
        begun = joined(body.messages[-1].content) if body.echo else ""
        run = await start(request, chats, job)
        if not body.stream:
            return await answer_whole(request, run, whole(run, shape, job.wish.n, begun), headers)
        chunks = Chunks(run, shape, job.wish.n, begun)
        return await stream_chunks(request, run, chunks.of, settings.ping, headers)

    @routes.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatRequest, request: Request) -> dict[str, Any]:
        """How many tokens the prompt of such a request has."""
        models.check_name(body.model)
        tokens = await chats.count_tokens(body.job(request_id(request)))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return routes


async def stream_chunks(
    request: Request,
    run: ChatRun,
    chunks: Callable[[AsyncIterable[ChatEvent]], AsyncIterator[dict[str, Any]]],
    ping: float,
    headers: dict[str, str],
) -> Response:
    """A stream of what `chunks` makes of the run's events."""

    async def lines(events: AsyncIterable[ChatEvent]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks(events):
                yield data_event(chunk)
            yield DONE
        except Exception as error:  # noqa: BLE001 - the status line is long sent: an event tells, then the stream ends
            yield error_event(error)

    return await answer_stream(request, run, lines, ping, headers)
