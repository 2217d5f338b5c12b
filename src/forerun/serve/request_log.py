"""One line for each request, when it is over. Nothing of prompts or answers is in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.request_ids import request_id

log = logging.getLogger("forerun.requests")
# What programs ask for again and again: told with --log-level debug, or where it fails.
ROUTINE = frozenset({"/health", "/v1/health", "/ready", "/stats", "/metrics", "/page/{name:path}"})
LEFT = 499  # the status where a client left before there was one: nginx's number
LONGEST_PATH = 100


class Figures(Protocol):
    """What an answer took."""

    def figures(self, began: float) -> Mapping[str, Any]:
        """So far; `began`: when its request did."""
        ...


@dataclass(slots=True)
class ServedRequest:
    """A request being served."""

    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None  # once a response has begun
    answer: Figures | None = None  # where one was begun


CURRENT: ContextVar[ServedRequest | None] = ContextVar("request", default=None)


def current_id() -> str:
    """Of the request that this is done for; empty where it is for none."""
    request = CURRENT.get()
    return "" if request is None else request.id


def note_answer(answer: Figures) -> None:
    """The request that is being served is answered by this."""
    request = CURRENT.get()
    if request is not None:
        request.answer = answer


class RequestLog:
    """ASGI middleware: all that is done inside it knows which request it is done for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = ServedRequest(request_id(scope))
        CURRENT.set(request)  # for the rest of this request's task: what uvicorn says of a failure has the id, too

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            _tell(scope, request)


def _tell(scope: Scope, request: ServedRequest) -> None:
    status, route = LEFT if request.status is None else request.status, _route(scope)
    level = logging.DEBUG if route in ROUTINE and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    client = scope.get("client")
    facts: dict[str, Any] = {
        "client": client[0] if client else None,
        "route": f"{scope['method']} {route}",
        "status": status,
        "seconds": time.perf_counter() - request.began,
        **({} if request.answer is None else request.answer.figures(request.began)),
    }
    facts = {name: round(value, 3) if isinstance(value, float) else value for name, value in facts.items()}
    log.log(level, "%s", " ".join(map(_word, facts.items())), extra={"facts": facts})


def _route(scope: Scope) -> str:
    """The address as it was declared; one that is not served is written as a single harmless word."""
    declared = getattr(scope.get("route"), "path", None)
    return str(declared) if declared else quote(scope["path"], safe="/:@-._~")[:LONGEST_PATH]


def _word(fact: tuple[str, Any]) -> str:
    name, value = fact
    return str(value) if name == "route" else f"{name}={'-' if value is None else value}"
