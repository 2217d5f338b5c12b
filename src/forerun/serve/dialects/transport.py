"""Answers on their way to the client: whole, or as a stream of events, in the form of a dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from forerun.serve.chat_events import ChatEvent, ChatRun, ChatService
from forerun.serve.chat_job import ChatJob
from forerun.serve.error_bodies import as_api_error
from forerun.serve.errors import ApiError
from forerun.serve.sse import Peeked, Stream, data_event, shielded, unless_gone

Json = dict[str, Any]


class EventEncoder(ABC):
    """Chat events into a dialect's own: one by one for a stream, or all of them as one answer."""

    last_line: ClassVar[bytes] = b""  # of a stream that went well
    answer: Json  # what the events so far add up to

    @abstractmethod
    def start(self) -> Iterable[Json]:
        """What a stream begins with, before the prompt was read."""

    @abstractmethod
    def events(self, event: ChatEvent) -> Iterable[Json]:
        """What becomes of one chat event."""

    @abstractmethod
    def failed(self, error: ApiError) -> Json:
        """The last event of a stream that ends here."""

    def ping(self) -> Json | None:
        """A sign of life; None: a comment will do, or the last event was made."""
        return None

    async def whole(self, run: ChatRun) -> Json:
        """The answer in one piece: its events are made, and nobody gets them."""
        for _ in self.start():
            pass
        async for event in run:
            for _ in self.events(event):
                pass
        return self.answer

    async def lines(self, events: AsyncIterable[ChatEvent]) -> AsyncIterator[bytes]:
        """The stream. Events that say their type have it as their name as well."""
        try:
            for data in self.start():
                yield data_event(data, data.get("type"))
            async for event in events:
                for data in self.events(event):
                    yield data_event(data, data.get("type"))
            if self.last_line:
                yield self.last_line
        except Exception as error:  # noqa: BLE001 - the status is out already: an event tells, then the stream ends
            data = self.failed(as_api_error(error))
            yield data_event(data, data.get("type"))


async def start(request: Request, service: ChatService, job: ChatJob) -> ChatRun:
    """Queue it, unless the client leaves before that is done."""
    return await unless_gone(request, service.start(job), lambda run: run.close())


async def respond(
    request: Request,
    run: ChatRun,
    encoder: EventEncoder,
    headers: Mapping[str, str],
    *,
    stream: bool | None,
    ping: float,
) -> Response:
    """The run's answer in the encoder's form. What fails before the first event of a stream fails as a status."""
    if not stream:
        try:
            return JSONResponse(await unless_gone(request, encoder.whole(run)), headers=dict(headers))
        finally:
            await shielded(run.close())
    events = Peeked(run)

    async def close() -> None:
        await events.close()
        await run.close()

    try:
        await unless_gone(request, events.peek(ping))
    except BaseException:
        await shielded(close())
        raise
    return Stream(encoder.lines(events), close=close, ping=ping, headers=headers, sign_of_life=encoder.ping)
