"""Request ids: the client's own where it sent a harmless one, else a fresh one. Every response carries it."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAMES = ("X-Request-Id", "request-id")  # OpenAI's clients read the first, Anthropic's the second
HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """ASGI middleware, the outermost: errors of all others have an id too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        own = sent.decode("ascii") if HARMLESS.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = own

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict.fromkeys(NAMES, own))
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id(scope: Scope) -> str:
    """Of the request being served."""
    return str(scope["state"]["request_id"])
