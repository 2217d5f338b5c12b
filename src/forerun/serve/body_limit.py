"""How much a client may send, and how long it may take to send it."""

from __future__ import annotations

import asyncio
import contextlib
import re

from fastapi.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.serve.error_bodies import error_response
from forerun.serve.errors import ApiError

SECONDS = 60.0  # for a whole body
DISCARDED, PATIENCE = 256 << 20, 5.0  # bytes and seconds of a body that is too large
# Of a JSON body: reading many more than a million numbers would stop all other answers for too long.
MOST_VALUES = 1 << 20
CONTAINER = 10  # a list, an object or one of its keys takes as long as so many numbers
# A whole string, or the quote of one that goes on in the next part of the body. Never looks at a byte twice.
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(").*\Z', re.DOTALL)
CLOSE = {"Connection": "close"}  # what is left of the body is not read


class BodyLimit:
    """ASGI middleware: counts the body as it comes in, so that nothing above the limit is ever kept."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced[:20]) > self._limit:
            if not any(name == b"expect" for name, _ in scope["headers"]):  # else it waits for our word to send it
                await _discard(receive)
            await error_response(scope, ApiError(413, self._message(), headers=CLOSE))(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        read, complete, values = 0, False, JsonSize()
        end = asyncio.get_running_loop().time() + SECONDS

        async def counted() -> Message:
            nonlocal read, complete
            if complete:  # what comes now is the client's leaving, which may take as long as the answer does
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "The body took too long to arrive.", headers=CLOSE) from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if read > self._limit:
                    await _discard(receive)
                    raise HTTPException(413, self._message(), headers=CLOSE)
                if b"\0" in message.get("body", b""):  # UTF-16, which `values` would not understand
                    raise HTTPException(400, "The body must be JSON in UTF-8.", headers=CLOSE)
                if not values.add(message.get("body", b"")):
                    await _discard(receive)
                    raise HTTPException(413, "The body has too many values.", headers=CLOSE)
            return message

        return counted

    def _message(self) -> str:
        return f"The body is larger than {self._limit} bytes."


async def _discard(receive: Receive) -> None:
    """Read on for a while: a client that is still sending when the connection closes never sees the answer."""
    left = DISCARDED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


class JsonSize:
    """How many values a JSON body has, counted as it comes in: not in strings, however they are cut into parts."""

    def __init__(self) -> None:
        self._counted = 0
        self._open = b""  # the beginning of a string that has not ended yet, as far as it matters

    def add(self, part: bytes) -> bool:
        """False: there are too many."""
        text = self._open + part
        outside = STRINGS.sub(rb"\1", text)
        self._open = b""
        if outside.endswith(b'"'):
            backslashes = len(text) - len(text.rstrip(b"\\"))
            self._open = b'"\\' if backslashes % 2 else b'"'
        self._counted += outside.count(b",") + CONTAINER * sum(outside.count(mark) for mark in (b"[", b"{", b":"))
        return self._counted <= MOST_VALUES
