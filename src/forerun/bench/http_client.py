"""A small HTTP client on asyncio's streams for load tests: cheap enough that 64 clients do not slow the server down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import urlsplit

from forerun.errors import ForerunError

Connected = TypeVar("Connected")
LONGEST_LINE = 16 << 20  # bytes; a line of a stream holds all that one round gave


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

    async def get(self, path: str) -> Any:
        """A JSON document."""
        async with self._request("GET", path, None) as response:
            return json.loads(await response.read())

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A JSON document for another."""
        async with self._request("POST", path, body) as response:
            return json.loads(await response.read())

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Server-sent events up to [DONE]. Close it (`aclosing`) to hang up."""
        async with self._request("POST", path, body) as response:
            async for event in response.events():
                yield event

    async def timed(self, path: str, body: Mapping[str, Any]) -> list[tuple[float, dict[str, Any]]]:
        """The same, each with the time at which it came in; at the end they are looked at, and not before.

        On the cores that a server computes with, a client that does more takes time from what it measures.
        """
        data = json.dumps(body).encode()
        connect = asyncio.get_running_loop().create_connection(Arrivals, self.host, self.port, ssl=self.secure or None)
        transport, arrivals = await self._connected(connect)
        with self._errors():
            try:
                transport.write(self._head("POST", path, len(data)) + data)
                await arrivals.over
            finally:
                transport.close()
            response = await Response.begin(arrivals.reader())
            return [(arrivals.time_of(response.taken), event) async for event in response.events()]

    async def _connected(self, connection: Awaitable[Connected]) -> Connected:
        try:
            return await connection
        except OSError as error:
            raise ForerunError(f"no answer from {self.netloc}: {error}") from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What comes of a connection that breaks, or of a server of another kind."""
        try:
            yield
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ForerunError(f"the connection to {self.netloc} broke: {error!r}") from error
        except (ValueError, LookupError, asyncio.LimitOverrunError) as error:
            raise ForerunError(f"{self.netloc} does not answer as a server for OpenAI's clients does") from error

    @contextlib.asynccontextmanager
    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[Response]:
        data = b"" if body is None else json.dumps(body).encode()
        connect = asyncio.open_connection(self.host, self.port, ssl=self.secure or None, limit=LONGEST_LINE)
        reader, writer = await self._connected(connect)
        try:
            with self._errors():
                writer.write(self._head(method, path, len(data)) + data)
                await writer.drain()
                yield await Response.begin(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.netloc}", "Connection: close"]
        lines += [f"Content-Length: {length}", "Content-Type: application/json"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode()


class Arrivals(asyncio.Protocol):
    """What comes in, as it comes, and when."""

    def __init__(self) -> None:
        self._ends: list[int] = []  # bytes in all, after each part
        self._parts: list[bytes] = []
        self._times: list[float] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ends = list(accumulate(map(len, self._parts)))
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def reader(self) -> asyncio.StreamReader:
        """All of it, after the end."""
        reader = asyncio.StreamReader(LONGEST_LINE)
        reader.feed_data(b"".join(self._parts))
        reader.feed_eof()
        return reader

    def time_of(self, taken: int) -> float:
        """When so many bytes had come in."""
        return self._times[bisect_left(self._ends, taken)]


@dataclass(slots=True)
class Response:
    """The body of a response whose head was read."""

    headers: dict[str, str]
    reader: asyncio.StreamReader
    taken: int  # bytes of the response, head and all, that were read

    @classmethod
    async def begin(cls, reader: asyncio.StreamReader) -> Response:
        """`HttpError` where the server refuses."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        response = cls({name.lower(): value.strip() for name, _, value in pairs}, reader, len(head))
        status = int(first.split()[1])
        if status != 200:
            raise HttpError(status, _complaint(await response.read()))
        return response

    async def parts(self) -> AsyncIterator[bytes]:
        """As they come: chunks, or all of it."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            data = await self.reader.read(-1)
            self.taken += len(data)
            yield data
            return
        while size := int((line := await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            part = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            self.taken += len(line) + size + 2
            yield part

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Server-sent ones, up to [DONE]."""
        async for line in self.lines():
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ForerunError(f"the server stopped: {event['error']}")
                yield event

    async def read(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts()])

    async def lines(self) -> AsyncIterator[bytes]:
        """Whole lines, wherever the chunks were cut."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line
        if rest:
            yield rest


def _complaint(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")
