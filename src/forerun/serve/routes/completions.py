"""OpenAI's completions: POST /v1/chat/completions with its token count, and POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from forerun.serve.chat_events import ChatService
from forerun.serve.completion_service import CompletionPipeline
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.transport import respond, start
from forerun.serve.model_service import ModelService
from forerun.serve.routes.chat_chunks import ChatEncoder
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.completion_chunks import TextEncoder
from forerun.serve.routes.completion_request import CompletionRequest
from forerun.serve.routes.openai_fields import GenerationFields
from forerun.serve.settings import ServeSettings
from forerun.serve.sse import unless_gone


def router(chats: ChatService, texts: CompletionPipeline, models: ModelService, settings: ServeSettings) -> APIRouter:
    """Chats and texts."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        models.check_name(body.model)
        headers = _headers(body, settings.strict_fields)
        job = body.job()
        begun = job.messages[-1]["content"] if body.echo else ""
        run = await start(request, chats, job)
        encoder = ChatEncoder(run, body, begun)
        return await respond(request, run, encoder, headers, stream=body.stream, ping=settings.ping)

    @routes.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatRequest) -> dict[str, Any]:
        """How many tokens the prompt of such a request has."""
        models.check_name(body.model)
        return {"object": "response.input_tokens", "input_tokens": await chats.count_tokens(body.job())}

    @routes.post("/v1/completions", response_model=None)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, fill a gap in one, or rate one."""
        models.check_name(body.model)
        headers = _headers(body, settings.strict_fields)
        job = body.job()
        started = await unless_gone(request, texts.start(job), lambda started: started.run.close())
        encoder = TextEncoder(started, body)
        return await respond(request, started.run, encoder, headers, stream=body.stream, ping=settings.ping)

    return routes


def _headers(body: GenerationFields, strict: bool) -> dict[str, str]:
    """Names what was sent and changes nothing."""
    notes = Notes()
    body.note_harmless(notes, strict=strict)
    body.note_unused(notes)
    return notes.headers()
