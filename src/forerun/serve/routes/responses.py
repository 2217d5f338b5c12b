"""OpenAI's Responses API, which Codex speaks: the chat pipeline in other words. Nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from forerun.serve.chat_events import ChatService
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.responses_events import Named, ResponsesEncoder
from forerun.serve.dialects.responses_job import make_job
from forerun.serve.dialects.responses_request import InputTokensRequest, ResponsesRequest
from forerun.serve.dialects.transport import respond, start
from forerun.serve.errors import ApiError
from forerun.serve.settings import ServeSettings
from forerun.serve.sse import data_event


def router(service: ChatService, settings: ServeSettings) -> APIRouter:
    """`/v1/responses` and `/v1/responses/input_tokens`."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """An answer in the form of the Responses API, whole or as events."""
        notes = _notes(body)
        job, declared = make_job(body, notes)
        try:
            run = await start(request, service, job)
        except ApiError as error:
            if not (body.stream and error.code == "context_length_exceeded" and _is_codex(request)):
                raise
            # OpenAI says this in a stream, and that is where Codex looks for it before it shortens the conversation.
            unborn = Named(uuid.uuid4().hex, int(time.time()), service.model)
            return _failed_stream(ResponsesEncoder(unborn, body, declared), error, notes)
        encoder = ResponsesEncoder(run, body, declared)
        return await respond(request, run, encoder, notes.headers(), stream=body.stream, ping=settings.ping)

    @routes.post("/v1/responses/input_tokens", response_model=None)
    async def count(body: InputTokensRequest) -> Response:
        """How many tokens such a request has, template and tools included."""
        notes = _notes(body)
        job, _ = make_job(body, notes)
        count: dict[str, Any] = {"object": "response.input_tokens", "input_tokens": await service.count_tokens(job)}
        return JSONResponse(count, headers=notes.headers())

    def _notes(body: InputTokensRequest) -> Notes:
        notes = Notes()
        notes.model(body.model, service.model)
        body.note_harmless(notes, strict=settings.strict_fields)
        return notes

    return routes


def _is_codex(request: Request) -> bool:
    return "codex" in (request.headers.get("originator", "") + request.headers.get("user-agent", "")).lower()


def _failed_stream(encoder: ResponsesEncoder, error: ApiError, notes: Notes) -> Response:
    events = [*encoder.start(), encoder.failed(error)]
    body = b"".join(data_event(data, data["type"]) for data in events)
    return Response(body, media_type="text/event-stream", headers=notes.headers())
