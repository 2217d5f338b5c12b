"""The server's application: routes, errors and guards around one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from forerun import __version__
from forerun.serve.body_limit import BodyLimit
from forerun.serve.chat_service import ChatPipeline
from forerun.serve.completion_service import CompletionPipeline
from forerun.serve.error_bodies import CatchAll, add_error_handlers
from forerun.serve.http_counts import HttpCounts
from forerun.serve.leniency import Leniency
from forerun.serve.load_header import LoadHeader
from forerun.serve.model_service import ModelService
from forerun.serve.off_loop import OffLoop
from forerun.serve.request_ids import RequestIds
from forerun.serve.request_log import RequestLog
from forerun.serve.routes import completions, generate, messages, models, page, responses, service, tokens
from forerun.serve.security import AccessControl
from forerun.serve.settings import ServeSettings

if TYPE_CHECKING:
    from forerun.serve.metrics import Metrics

OPEN_PATHS = ("/health", "/v1/health", "/ready")  # without a key, beside the page's files


def create_app(model_service: ModelService, settings: ServeSettings, metrics: Metrics | None = None) -> FastAPI:
    """Everything hangs on what is given here: two applications in one process know nothing of each other.

    `metrics`: what Prometheus reads.
    """
    off_loop = OffLoop(settings.template_timeout)
    chats = ChatPipeline(model_service, settings, off_loop)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Threads end with the server."""
        yield
        await asyncio.gather(off_loop.end(), chats.end())

    # The page with the documentation would fetch its scripts from elsewhere: there is only the document itself.
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    texts = CompletionPipeline(model_service, settings, off_loop)
    files = page.page_files() if settings.page else {}
    app.include_router(completions.router(chats, texts, model_service, settings))
    app.include_router(models.router(model_service))
    app.include_router(service.router(model_service, settings, None if metrics is None else metrics.render))
    app.include_router(tokens.router(chats, model_service, off_loop))
    app.include_router(generate.router(chats, texts, model_service, settings))
    app.include_router(responses.router(chats, settings))
    app.include_router(messages.router(chats, settings))
    app.include_router(page.router(files))
    add_error_handlers(app)
    # From the inside to the outside: a request passes them from the last to the first.
    app.add_middleware(CatchAll)
    app.add_middleware(LoadHeader, state=model_service.state)
    app.add_middleware(BodyLimit, limit=settings.max_body)
    app.add_middleware(AccessControl, settings=settings, open_paths=(*OPEN_PATHS, *files))
    app.add_middleware(RequestLog)
    app.add_middleware(RequestIds)
    if metrics is not None:
        app.add_middleware(HttpCounts, registry=metrics.registry)
    app.add_middleware(Leniency)
    app.state.models, app.state.chats = model_service, chats
    return app
