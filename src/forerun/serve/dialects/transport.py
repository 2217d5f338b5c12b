"""Answers on their way to the client: whole, or as a stream of events, in the form of a dialect."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forerun.serve.chat_events import ChatEvent, ChatRun
from forerun.serve.dialects.conversation import compact
from forerun.serve.errors import ApiError

Json = dict[str, Any]
log = logging.getLogger(__name__)


class Encoder(Protocol):
    """Chat events into a dialect's own. It also keeps the whole answer, for clients that want no stream."""

    def start(self) -> Iterable[Json]: ...

    def events(self, event: ChatEvent) -> Iterable[Json]: ...

    def failed(self, error: ApiError) -> Iterable[Json]: ...

    def ping(self) -> Json: ...

    def answer(self) -> Json:
        """After the last event."""
        ...


async def whole_answer(request: Request, run: ChatRun, encoder: Encoder, headers: Mapping[str, str]) -> Response:
    """All of it at once. A client that leaves stops the work."""

    async def read() -> Json:
        for _ in encoder.start():
            pass
        async for event in run:
            for _ in encoder.events(event):
                pass
        return encoder.answer()

    answer = asyncio.ensure_future(read())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ApiError(499, "The client closed the connection.")
        return JSONResponse(answer.result(), headers=dict(headers))
    finally:
        for task in (gone, answer):
            await _cancelled(task)
        await _to_the_end(run.close())


class EventStream(EventSourceResponse):
    """Events of a run as they come. However it ends, the run is closed: also before its first event was asked for."""

    def __init__(self, run: ChatRun, encoder: Encoder, ping: float, headers: Mapping[str, str]) -> None:
        super().__init__(
            _sent_events(run, encoder),
            ping=ping,
            ping_message_factory=lambda: _sent(encoder.ping()),
            headers=dict(headers),
        )
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _to_the_end(self._run.close())


async def _sent_events(run: ChatRun, encoder: Encoder) -> AsyncIterator[ServerSentEvent]:
    for data in encoder.start():
        yield _sent(data)
    try:
        async for event in run:
            for data in encoder.events(event):
                yield _sent(data)
    except ApiError as error:
        failure = error
    except Exception:  # the status is out already: the stream must say it
        log.exception("an answer failed while it was streamed")
        failure = internal_error()
    else:
        return
    for data in encoder.failed(failure):
        yield _sent(data)


def _sent(data: Json) -> ServerSentEvent:
    return ServerSentEvent(compact(data), event=data["type"])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Even where whoever waits for it is cancelled."""
    await asyncio.shield(asyncio.ensure_future(work))


def internal_error() -> ApiError:
    """What a client may know of a fault of ours."""
    return ApiError(500, "The server failed to answer; its log says why.")


def request_id(request: Request) -> str:
    """The one that the app gave it or the client brought, so that logs on both sides speak of the same thing."""
    given = getattr(request.state, "request_id", None) or request.headers.get("x-request-id")
    return given if isinstance(given, str) and given.isprintable() and len(given) <= 128 else uuid.uuid4().hex


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, with the path to it."""
    first = error.errors()[0]
    path = ".".join(str(step) for step in first["loc"] if step != "body")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")
    said = f"{path}: {first['msg']}" if path else str(first["msg"])
    return ApiError(400, f"{said}.", param=path or None, code="invalid_value")


def dialect_route(encode: Callable[[ApiError, str], Json]) -> type[APIRoute]:
    """Routes whose errors have the dialect's form: `encode(error, request id)`."""

    class DialectRoute(APIRoute):
        """Every error that a handler or the check of its body raises."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            """The handler, guarded."""
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestValidationError as invalid:
                    error = validation_error(invalid)
                except ApiError as known:
                    error = known
                except HTTPException as refused:
                    error = ApiError(refused.status_code, str(refused.detail))
                except Exception:
                    log.exception("a request failed")
                    error = internal_error()
                return JSONResponse(encode(error, request_id(request)), error.status, headers=error.headers)

            return guarded

    return DialectRoute
