"""Clients that leave or do not read, and prompts that take the threads of others: nothing is held for long."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any, cast

import pytest
from fastapi import Request
from serve_fakes import FakeEngine, app_for, live, until

from forerun.serve import connection
from forerun.serve.chat_events import ChatRun, ChatService
from forerun.serve.chat_job import ChatJob
from forerun.serve.dialects import transport
from forerun.serve.errors import ApiError
from forerun.serve.off_loop import THREADS, OffLoop

ASK: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


class LateRun:
    """Started although its client had left."""

    closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_dialects_answer_that_starts_too_late_is_closed(seconds: float) -> None:
    """Nobody read it and nobody closed it: it kept its place and its pages for an hour."""
    run = LateRun()

    class Service:
        async def start(self, job: ChatJob) -> ChatRun:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(5)
            return cast(ChatRun, run)

    async def gone() -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    async def main() -> None:
        request = Request({"type": "http"}, gone)
        with pytest.raises(ApiError) as error:
            await transport.start(request, cast(ChatService, Service()), ChatJob(messages=ASK))
        assert error.value.status == 499

    asyncio.run(main())
    assert run.closed


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_client_that_reads_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """What it held, others waited for: until its request had taken an hour."""
    monkeypatch.setattr(connection, "STALLED", 0.3)
    engine = FakeEngine(say=lambda work: "word " * 40_000, per_round=500)
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "stream": True, "max_tokens": 2000}
    if path == "/v1/chat/completions":
        body |= {"logprobs": True, "top_logprobs": 20}
    with live(app_for(engine)) as address:
        host, port = address.removeprefix("http://").split(":")
        readers = []
        for _ in range(1 if "logprobs" in body else 3):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            reader.connect((host, int(port)))
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            reader.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            readers.append(reader)
        until(lambda: engine.started)
        until(lambda: engine.running == 0)
        for reader in readers:
            reader.close()


def test_a_slow_reader_that_goes_on_reading_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is late for longer than a client may take nothing."""
    monkeypatch.setattr(connection, "STALLED", 0.4)
    engine = FakeEngine(say=lambda work: "word " * 2000, per_round=500)
    body = {"model": "tiny", "messages": ASK, "stream": True, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    with live(app_for(engine)) as address, socket.socket() as reader:
        host, port = address.removeprefix("http://").split(":")
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        reader.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        came, began = b"", time.monotonic()
        while part := reader.recv(1 << 16):
            came += part
            if time.monotonic() - began < 1.5:
                time.sleep(0.01)
    assert time.monotonic() - began > 1 and b"[DONE]" in came


def test_who_waits_for_the_prompts_of_others_did_nothing_wrong() -> None:
    """It got 400 for a prompt that nobody had looked at."""
    end = threading.Event()

    async def main() -> None:
        off_loop = OffLoop(0.1)
        slow = [asyncio.ensure_future(off_loop.run(lambda: end.wait(5), "messages")) for _ in range(THREADS)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as waited:
            await off_loop.run(lambda: None, "messages")
        assert waited.value.status == 503 and waited.value.headers["Retry-After"]
        for one in slow:
            with pytest.raises(ApiError) as took_long:
                await one
            assert took_long.value.status == 400
        end.set()
        off_loop.close()

    asyncio.run(main())
