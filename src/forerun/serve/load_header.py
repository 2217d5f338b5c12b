"""The load with every answer, for routers that ask for it: `endpoint-load-metrics` in one of ORCA's forms.

A router sends `endpoint-load-metrics-format: TEXT` or `JSON` with a request and reads the header of its response.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.engine_client import EngineState

ASKED, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"


class LoadHeader:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: Callable[[], EngineState]) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get(ASKED, "").upper() if scope["type"] == "http" else ""
        if asked not in ("TEXT", "JSON"):
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[TOLD] = load(self._state(), asked)
            await send(message)

        await self._app(scope, receive, send_with_load)


def load(state: EngineState, form: str) -> str:
    """The two that routers weigh.

    >>> load(EngineState("ready", waiting=3, cache_usage=0.5), "TEXT")
    'TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=3'
    """
    named = {"kv_cache_usage_perc": state.cache_usage, "num_requests_waiting": state.waiting}
    if form == "JSON":
        return f"JSON {json.dumps({'named_metrics': named})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
