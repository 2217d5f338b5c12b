"""Answers on their way to the client: whole, or as a stream of events, in the form of a dialect."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from forerun.serve.chat_events import ChatEvent, ChatRun, ChatService
from forerun.serve.chat_job import ChatJob
from forerun.serve.error_bodies import as_api_error
from forerun.serve.errors import ApiError
from forerun.serve.sse import Peeked, Stream, data_event, shielded, unless_gone

Json = dict[str, Any]


class Encoder(Protocol):
    """Chat events into a dialect's own. It also keeps the whole answer, for clients that want no stream."""

    def start(self) -> Iterable[Json]: ...

    def events(self, event: ChatEvent) -> Iterable[Json]: ...

    def failed(self, error: ApiError) -> Iterable[Json]: ...

    def ping(self) -> Json | None:
        """A sign of life; None once the last event was made."""
        ...

    def answer(self) -> Json:
        """After the last event."""
        ...


async def start(request: Request, service: ChatService, job: ChatJob) -> ChatRun:
    """Queue it, unless the client leaves before that is done."""
    return await unless_gone(request, service.start(job), lambda run: run.close())


async def answer_whole(
    request: Request, run: ChatRun, read: Coroutine[Any, Any, Json], headers: Mapping[str, str]
) -> Response:
    """What `read` makes of the run, all of it at once."""
    try:
        return JSONResponse(await unless_gone(request, read), headers=dict(headers))
    finally:
        await shielded(run.close())


async def answer_stream(
    request: Request,
    run: ChatRun,
    lines: Callable[[AsyncIterable[ChatEvent]], AsyncIterator[bytes]],
    ping: float,
    headers: Mapping[str, str],
    sign_of_life: Callable[[], Json | None] = lambda: None,
) -> Response:
    """What `lines` makes of the run's events, as they come. What fails before the first of them fails as a status."""
    events = Peeked(run)

    async def close() -> None:
        await events.close()
        await run.close()

    try:
        await unless_gone(request, events.peek(ping))
    except BaseException:
        await shielded(close())
        raise
    return Stream(lines(events), close=close, ping=ping, headers=headers, sign_of_life=sign_of_life)


async def folded(encoder: Encoder, run: ChatRun) -> Json:
    """The whole answer of an encoder: its events are made, and nobody gets them."""
    for _ in encoder.start():
        pass
    async for event in run:
        for _ in encoder.events(event):
            pass
    return encoder.answer()


async def sent(encoder: Encoder, events: AsyncIterable[ChatEvent]) -> AsyncIterator[bytes]:
    """The events of an encoder."""
    try:
        for data in encoder.start():
            yield data_event(data, data["type"])
        async for event in events:
            for data in encoder.events(event):
                yield data_event(data, data["type"])
    except Exception as error:  # noqa: BLE001 - the status is out already: an event tells, then the stream ends
        for data in encoder.failed(as_api_error(error)):
            yield data_event(data, data["type"])
