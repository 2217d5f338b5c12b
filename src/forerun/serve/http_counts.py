"""How many requests came to which address, and with what status they were answered."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS"))  # any other text may be one: it must not become a label


class HttpCounts:
    """ASGI middleware. Addresses are those of routes, so that there are few; `none`: there is no such route."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        labels = ("method", "handler", "status")
        self._count = Counter("http_requests", "Requests by method, address and status.", labels, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else "other"
                handler = getattr(scope.get("route"), "path", "none")
                self._count.labels(method, handler, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
