"""OpenAI's Responses API, which Codex speaks: the chat pipeline in other words. Nothing is kept between requests."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from forerun.serve.chat_events import ChatService
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.responses_errors import openai_error
from forerun.serve.dialects.responses_events import ResponsesEncoder
from forerun.serve.dialects.responses_job import make_job
from forerun.serve.dialects.responses_request import Prompt, ResponsesRequest
from forerun.serve.dialects.transport import EventStream, dialect_route, request_id, whole_answer
from forerun.serve.settings import ServeSettings


def router(service: ChatService, settings: ServeSettings) -> APIRouter:
    """`/v1/responses` and `/v1/responses/input_tokens`."""
    routes = APIRouter(route_class=dialect_route(openai_error), tags=["Responses"])

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """An answer in the form of the Responses API, whole or as events."""
        notes = Notes()
        notes.model(body.model, service.model)
        job, box = make_job(body, notes, request_id(request))
        run = await service.start(job)
        encoder = ResponsesEncoder(run, body, box)
        if body.stream:
            return EventStream(run, encoder, settings.ping, notes.headers())
        return await whole_answer(request, run, encoder, notes.headers())

    @routes.post("/v1/responses/input_tokens", response_model=None)
    async def count(body: Prompt) -> Response:
        """How many tokens such a request has, template and tools included."""
        notes = Notes()
        notes.model(body.model, service.model)
        job, _ = make_job(body, notes)
        count: dict[str, Any] = {"object": "response.input_tokens", "input_tokens": await service.count_tokens(job)}
        return JSONResponse(count, headers=notes.headers())

    return routes
