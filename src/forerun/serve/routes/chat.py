"""POST /v1/chat/completions and its token count."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from forerun.serve.chat_events import ChatService
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.transport import respond, start
from forerun.serve.model_service import ModelService
from forerun.serve.routes.chat_chunks import ChatEncoder
from forerun.serve.routes.chat_messages import joined
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.chunks import Shape
from forerun.serve.settings import ServeSettings


def router(chats: ChatService, models: ModelService, settings: ServeSettings, fingerprint: str) -> APIRouter:
    """OpenAI's chat completions."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        models.check_name(body.model)
        job = body.job()
        notes = Notes()
        body.note_unused(notes)
        shape = Shape(
            fingerprint,
            include_usage=body.include_usage,
            logprobs=bool(body.logprobs),
            token_details=bool(body.return_token_details),
            echo=bool(body.echo),
        )
        begun = joined(body.messages[-1].content) if body.echo else ""
        run = await start(request, chats, job)
        encoder = ChatEncoder(run, shape, job.wish.n, begun)
        return await respond(request, run, encoder, notes.headers(), stream=body.stream, ping=settings.ping)

    @routes.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatRequest) -> dict[str, Any]:
        """How many tokens the prompt of such a request has."""
        models.check_name(body.model)
        tokens = await chats.count_tokens(body.job())
        return {"object": "response.input_tokens", "input_tokens": tokens}

    return routes
