"""Requests as other servers take them: addresses without /v1, and JSON whatever the content type says."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

# With and without the prefix; what is below them too.
UNPREFIXED = ("/chat/completions", "/completions", "/models", "/responses", "/messages")


class Leniency:
    """ASGI middleware. curl says that a body is a form unless it is told otherwise, and forms are never taken here.

    Pages on the web could send forms without asking first, too: they are refused by their `Origin`, see `Guard`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if any(scope["path"] == known or scope["path"].startswith(f"{known}/") for known in UNPREFIXED):
                scope["path"] = f"/v1{scope['path']}"
            if scope["method"] == "POST":
                MutableHeaders(scope=scope)["Content-Type"] = "application/json"
        await self._app(scope, receive, send)
