"""A small HTTP client for load tests: cheap enough that 64 clients do not slow the server down."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, IncompleteRead
from itertools import accumulate
from typing import IO, Any
from urllib.parse import urlsplit

from forerun.errors import ForerunError


class HttpError(ForerunError):
    """The server refused."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answers {status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and its key."""

    host: str
    port: int
    secure: bool = False
    path: str = ""  # before /v1
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Address:
        """From http://127.0.0.1:8000, with or without /v1."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is none, or half of the brackets around an IPv6 address
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ForerunError(f"--url {url}: give an address such as http://127.0.0.1:8000")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ForerunError("the server's key must be printable ASCII: headers carry nothing else")
        secure = parts.scheme == "https"
        return cls(host, port or (443 if secure else 80), secure, parts.path.rstrip("/").removesuffix("/v1"), key)

    @property
    def netloc(self) -> str:
        """`127.0.0.1:8000`; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A JSON document, for another one or for nothing."""
        exchange = await self._exchange(path, body)
        with self._errors():
            return json.loads(exchange.response().read())

    async def stream(
        self, path: str, body: Mapping[str, Any], give_up: int | None = None
    ) -> list[tuple[float, dict[str, Any]]] | None:
        """Server-sent events up to [DONE], each with the time at which it came in; None: we hung up after so many.

        They are looked at when all have come: on the cores that a server computes with, a client that does more takes
        time from what it measures.
        """
        exchange = await self._exchange(path, body, give_up)
        if exchange.hung_up:
            return None
        with self._errors():
            return [(exchange.time_read(), event) for event in events(_lines(exchange.response()))]

    async def _exchange(self, path: str, body: Mapping[str, Any] | None, give_up: int | None = None) -> Exchange:
        """One request on a connection of its own. Who is cancelled meanwhile hangs up."""
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{'GET' if body is None else 'POST'} {self.path}{path} HTTP/1.1", f"Host: {self.netloc}"]
        lines += ["Connection: close", f"Content-Length: {len(data)}", "Content-Type: application/json"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        exchange = Exchange("\r\n".join([*lines, "", ""]).encode() + data, give_up)
        connect = asyncio.get_running_loop().create_connection
        try:
            transport, _ = await connect(lambda: exchange, self.host, self.port, ssl=self.secure or None)
        except OSError as error:
            raise ForerunError(f"no answer from {self.netloc}: {error}") from error
        with self._errors():
            try:
                await exchange.over
            finally:
                transport.close()
        return exchange

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What comes of a connection that breaks, or of a server of another kind."""
        try:
            yield
        except (OSError, IncompleteRead) as error:
            raise ForerunError(f"the connection to {self.netloc} broke: {error!r}") from error
        except (ValueError, LookupError, HTTPException) as error:
            raise ForerunError(f"{self.netloc} does not answer as a server for OpenAI's clients does") from error


class Exchange(asyncio.Protocol):
    """A request, and what comes back: as it comes, and when. `give_up`: hang up after so many events."""

    def __init__(self, request: bytes, give_up: int | None) -> None:
        self._request, self._give_up = request, give_up
        self._parts: list[bytes] = []
        self._times: list[float] = []
        self._seen = 0  # events, where somebody counts them
        self._ends: list[int] = []  # bytes in all, after each part
        self._stream = io.BufferedReader(io.BytesIO())
        self.hung_up = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._parts.append(data)
        if self._give_up is not None:
            self._seen += data.count(b"data:")
            if self._seen >= self._give_up:
                self.hung_up = True
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def response(self) -> HTTPResponse:
        """After the end: its head was read, its body was not. `HttpError` where the server refuses."""
        self._ends = list(accumulate(map(len, self._parts)))
        self._stream = io.BufferedReader(io.BytesIO(b"".join(self._parts)))
        response = HTTPResponse(self)  # type: ignore[arg-type]  # of a socket it wants `makefile` alone
        response.begin()
        if response.status != 200:
            raise HttpError(response.status, complaint(response.read()))
        return response

    def makefile(self, _: str) -> IO[bytes]:
        """Everything that came in."""
        return self._stream

    def time_read(self) -> float:
        """When that had come in which was read last."""
        return self._times[bisect_left(self._ends, self._stream.tell())]


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    """As iterating over the response gives them, but cheaper."""
    rest = b""
    while part := response.read1():
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
    yield rest


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]; comments are pings."""
    try:
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ForerunError(f"the server stopped: {_message(event)}")
                yield event
    except (OSError, HTTPException, ValueError) as error:
        raise ForerunError(f"the connection broke: {error or type(error).__name__}") from error
    raise ForerunError("the connection broke: the server ended it in the middle of the answer")


def complaint(data: bytes) -> str:
    """The message in an error's body, or its beginning."""
    try:
        return _message(json.loads(data))
    except (ValueError, AttributeError):
        return data[:200].decode("utf-8", "replace")


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or body)
