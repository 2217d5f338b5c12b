"""Streams of server-sent events, and work that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from forerun.serve.errors import ApiError

Item = TypeVar("Item")
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
# No line ends in a stream of events; but clients that read it line by line (httpx, requests) take them for some.
LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


def data_event(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One event, its data in one line."""
    body = _json(data)
    return (f"event: {event}\ndata: {body}\n\n" if event else f"data: {body}\n\n").encode()


def _json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(LINE_ENDS)


class Stream(EventSourceResponse):
    """The events, with a sign of life in between where they are long in coming: a comment, or an event of the API's.

    `close` is called at the end however that comes about: also when the client left before the first event was asked
    for, which a `finally` inside the events would not notice.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        close: Callable[[], Coroutine[Any, Any, None]],
        ping: float,
        headers: Mapping[str, str],
        sign_of_life: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        def sign() -> ServerSentEvent:
            data = sign_of_life()
            if data is None:
                return ServerSentEvent(comment="ping", sep="\n")
            return ServerSentEvent(_json(data), event=data["type"], sep="\n")

        super().__init__(events, ping=ping, sep="\n", ping_message_factory=sign, headers=dict(headers))
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await shielded(self._close())

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Without one, for which the library sets up a scope around every event: `Connection` watches late readers."""
        await send(message)


class Peeked(Generic[Item]):
    """Items whose first one may be waited for ahead of time, so that an early error comes before any event."""

    def __init__(self, items: AsyncIterable[Item]) -> None:
        self._items = aiter(items)
        self._first: asyncio.Future[Item] | None = None

    async def peek(self, patience: float) -> None:
        """Wait for the first item, but not longer than `patience` seconds; raise what kept it from coming."""
        self._first = asyncio.ensure_future(anext(self._items))
        await asyncio.wait({self._first}, timeout=patience)
        if self._first.done():
            self._first.result()

    async def __aiter__(self) -> AsyncIterator[Item]:
        if self._first is not None:
            yield await self._first
        async for item in self._items:
            yield item

    async def close(self) -> None:
        """Nobody wants the first item any more."""
        if self._first is not None:
            await _cancelled(self._first)


async def unless_gone(
    request: Request,
    work: Coroutine[Any, Any, Result],
    undo: Callable[[Result], Awaitable[None]] | None = None,
) -> Result:
    """What `work` gives; when the client leaves first, the work is cancelled and nobody gets anything.

    `undo`: for a result that came all the same, and that nobody will take.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    taken = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        taken = task.done()
        if not taken:
            raise ApiError(499, "The client closed the connection.")
        return task.result()
    finally:
        await _cancelled(gone)
        if not taken:
            await shielded(_undone(task, undo))


async def _undone(task: asyncio.Future[Result], undo: Callable[[Result], Awaitable[None]] | None) -> None:
    await _cancelled(task)
    if undo is not None and not task.cancelled() and task.exception() is None:
        await undo(task.result())


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


async def shielded(work: Awaitable[None]) -> None:
    """Goes on to its end even when whoever waits for it is cancelled."""
    await asyncio.shield(asyncio.ensure_future(work))
