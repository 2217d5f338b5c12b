"""Anthropic's Messages API, which Claude Code speaks: the chat pipeline in other words."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from forerun.serve.chat_events import ChatService
from forerun.serve.dialects.messages_events import MessagesEncoder
from forerun.serve.dialects.messages_job import make_job
from forerun.serve.dialects.messages_request import CountRequest, MessagesRequest
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.transport import respond, start
from forerun.serve.errors import bad_request
from forerun.serve.request_ids import request_id
from forerun.serve.settings import ServeSettings

STATISTICS = "forerun-statistics"  # a beta that asks for what Anthropic's answers do not have


def router(service: ChatService, settings: ServeSettings) -> APIRouter:
    """`/v1/messages` and `/v1/messages/count_tokens`."""
    routes = APIRouter(tags=["Anthropic"])

    @routes.post("/v1/messages", response_model=None)
    async def create(body: MessagesRequest, request: Request) -> Response:
        """An answer in the form of the Messages API, whole or as events."""
        notes = _notes(body, request)
        job = make_job(body, notes)
        run = await start(request, service, job)
        told = STATISTICS in _betas(request) or job.wish.speculation.prove  # a proof is part of them
        encoder = MessagesEncoder(run, request_id(request.scope), statistics=told)
        return await respond(request, run, encoder, notes.headers(), stream=body.stream, ping=settings.ping)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count(body: CountRequest, request: Request) -> Response:
        """How many tokens such a request has, template and tools included."""
        notes = _notes(body, request)
        count = await service.count_tokens(make_job(body, notes))
        return JSONResponse({"input_tokens": count}, headers=notes.headers())

    def _notes(body: CountRequest, request: Request) -> Notes:
        """Fields that are not known here are errors, unless Claude Code sends them: then the warning names them."""
        if body.model_extra and "claude-code" not in _betas(request):
            name = next(iter(body.model_extra))
            raise bad_request(f"'{name}' is not supported.", name, "unknown_parameter")
        notes = Notes()
        notes.model(body.model, service.model)
        body.note_harmless(notes, strict=settings.strict_fields)
        return notes

    return routes


def _betas(request: Request) -> str:
    return ",".join(request.headers.getlist("anthropic-beta"))
