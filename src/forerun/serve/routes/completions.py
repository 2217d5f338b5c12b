"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from forerun.serve.completion_service import CompletionPipeline
from forerun.serve.dialects.notes import Notes
from forerun.serve.dialects.transport import respond
from forerun.serve.model_service import ModelService
from forerun.serve.routes.chunks import Shape
from forerun.serve.routes.completion_chunks import TextEncoder
from forerun.serve.routes.completion_request import CompletionRequest
from forerun.serve.settings import ServeSettings
from forerun.serve.sse import unless_gone


def router(
    completions: CompletionPipeline, models: ModelService, settings: ServeSettings, fingerprint: str
) -> APIRouter:
    """OpenAI's text completions."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/completions", response_model=None)
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, fill a gap in one, or rate one."""
        models.check_name(body.model)
        job = body.job()
        notes = Notes()
        body.note_unused(notes)
        shape = Shape(
            fingerprint,
            include_usage=body.include_usage,
            logprobs=body.logprobs is not None,
            token_details=bool(body.return_token_details),
            echo=job.echo,
        )
        started = await unless_gone(request, completions.start(job), lambda started: started.run.close())
        encoder = TextEncoder(started, shape, body.only_prompt)
        return await respond(request, started.run, encoder, notes.headers(), stream=body.stream, ping=settings.ping)

    return routes
