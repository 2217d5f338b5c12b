"""Starting and stopping: loading beside listening, the first signal drains, the second ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from serve_fakes import FakeEngine, call, loaded

from forerun.errors import ForerunError
from forerun.serve.app import create_app
from forerun.serve.model_service import ModelService
from forerun.serve.run import model_names, run_server, serve
from forerun.serve.settings import ServeSettings

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


class DrainingEngine(FakeEngine):
    """Ends when nothing runs any more, or after the time is over."""

    async def drain(self, timeout: float) -> None:
        self.status = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.running:
                    await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def served(engine: DrainingEngine, script: Callable[[str], None], **settings: Any) -> float:
    """Run a server on this thread with a script beside it; gives the seconds it took after the script."""
    port = free_port()
    chosen = ServeSettings(port=port, **settings)
    app = create_app(ModelService("tiny", engine, loaded=loaded(engine)), chosen)
    ended = 0.0

    async def main() -> None:
        nonlocal ended

        async def act() -> None:
            nonlocal ended
            await asyncio.to_thread(wait_for, f"http://127.0.0.1:{port}")
            await asyncio.to_thread(script, f"http://127.0.0.1:{port}")
            ended = time.monotonic()

        acting, serving = asyncio.ensure_future(act()), asyncio.ensure_future(serve(app, engine, chosen))
        await asyncio.wait({acting, serving}, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
        if acting.done() and acting.exception() is not None:
            serving.cancel()
        await acting
        await asyncio.wait_for(serving, 10)

    asyncio.run(main())
    return time.monotonic() - ended


def wait_for(address: str) -> None:
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            call(address, "/health")
            return
        time.sleep(0.01)
    raise AssertionError("it does not listen")


def test_the_first_signal_lets_answers_finish_and_refuses_new_ones() -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = DrainingEngine(say=lambda work: "word " * 40, pause=0.01)

    def script(address: str) -> None:
        with ThreadPoolExecutor(2) as threads:
            whole = threads.submit(call, address, "/v1/chat/completions", BODY)
            stream = threads.submit(call, address, "/v1/chat/completions", BODY | {"stream": True})
            while engine.running < 2:
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            while engine.status != "draining":
                time.sleep(0.005)
            assert call(address, "/v1/chat/completions", BODY).status == 503
            assert call(address, "/health").status == 503
            assert whole.result().json["choices"][0]["message"]["content"] == "word " * 40
            assert stream.result().text.endswith("data: [DONE]\n\n")

    before = signal.getsignal(signal.SIGTERM)
    assert served(engine, script) < 3
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signals", [1, 2])
def test_answers_that_take_too_long_are_cut_off(signals: int) -> None:
    """After the drain's time is over, or at once at the second signal."""
    engine = DrainingEngine(say=lambda work: "word " * 500, pause=0.05)

    def script(address: str) -> None:
        from serve_fakes import until
        from test_serve_streams import leave

        class Both:
            @property
            def running(self) -> bool:
                for number in range(signals):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.05 * (number + 1))
                return True

        with contextlib.suppress(ConnectionError, OSError):
            leave(address, BODY | {"stream": True}, "/v1/chat/completions", b"word", Both())  # type: ignore[arg-type]
        until(lambda: engine.running == 0)

    started = time.monotonic()
    served(engine, script, drain_timeout=0.2 if signals == 1 else 60)
    assert time.monotonic() - started < 8


def test_connections_that_dribble_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.serve.connection.SECONDS", 0.3)
    whole = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

    def script(address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        for head in (b"", whole[:30], whole + b"GET"):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(head)
                while connection.recv(1000):
                    pass  # the answer to what was whole; then the server closes
        monkeypatch.setattr("forerun.serve.connection.SECONDS", 60.0)
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            for _ in range(2):  # a connection in use is kept
                connection.sendall(whole)
                seen = b""
                while not seen.endswith(b"}"):
                    seen += connection.recv(1000) or pytest.fail("it was closed")
                assert b"200 OK" in seen
        os.kill(os.getpid(), signal.SIGTERM)

    served(DrainingEngine(), script)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise ForerunError("there is no such model")

    engine = DrainingEngine(status="loading")
    settings = ServeSettings(port=free_port())
    app = create_app(ModelService("tiny", engine), settings)
    with pytest.raises(ForerunError, match="no such model"):
        asyncio.run(serve(app, engine, settings, fail()))


def test_other_addresses_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ForerunError, match="set a key"):
        run_server(lambda: pytest.fail("it was loaded"), ServeSettings(host="0.0.0.0"))


def test_names_of_a_model() -> None:
    name, aliases = model_names("/models/Qwen3-0.6B.gguf", ServeSettings())
    assert name == "Qwen3-0.6B"
    assert "/models/Qwen3-0.6B.gguf" in aliases
    name, aliases = model_names("org/model", ServeSettings(served_model_name=("mine", "other")))
    assert (name, {"other", "model", "org/model"} <= {*aliases}) == ("mine", True)
