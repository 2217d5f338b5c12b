"""The server's application: routes, errors and guards around one model."""

from __future__ import annotations

from fastapi import FastAPI

from forerun import __version__
from forerun.serve.chat_service import ChatPipeline
from forerun.serve.error_bodies import add_error_handlers
from forerun.serve.model_service import ModelService
from forerun.serve.request_ids import RequestIds
from forerun.serve.routes import chat, models, service
from forerun.serve.settings import ServeSettings


def create_app(model_service: ModelService, settings: ServeSettings) -> FastAPI:
    """Everything hangs on what is given here: two applications in one process know nothing of each other."""
    # The page with the documentation would fetch its scripts from elsewhere: there is only the document itself.
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    chats = ChatPipeline(model_service, settings)
    fingerprint = f"forerun-{__version__}"
    app.include_router(chat.router(chats, model_service, settings, fingerprint))
    app.include_router(models.router(model_service))
    app.include_router(service.router(model_service, settings))
    # app.include_router(responses.router(chats, settings))
    # app.include_router(messages.router(chats, settings))
    add_error_handlers(app)
    app.add_middleware(RequestIds)
    app.state.models, app.state.chats = model_service, chats
    return app
