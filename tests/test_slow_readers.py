"""Readers that fall behind: what they hold goes to those who wait, and what they get stays what they get alone."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import torch
import uvicorn
from engines import PAGE, NoText, decoder, engine, finish, request, run
from local_engines import ask, language_model, read, serving, tokens, until, work
from serve_fakes import call, live
from serve_fakes import until as wait_until
from stream_rules import events_of, text_of
from tiny import tiny_model
from tiny_gemma import tiny_gemma
from tiny_qwen import tiny_of
from uvicorn.server import ServerState

from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder
from forerun.serve import connection
from forerun.serve.app import create_app
from forerun.serve.connection import Connection
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gemma4"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("m")
    return decoder(tiny_gemma(folder, "12B") if request.param == "gemma4" else tiny_of(folder, request.param), False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


def test_only_what_was_written_is_copied(family: Decoder) -> None:
    """Pages that were reserved for an answer to come are empty: eighty copies of them would fill the host."""
    wish, other = request([5, 6, 7], max_tokens=200), request([8, 9, 10], max_tokens=200)
    alone = run(engine(family), wish)[0].answer
    machine = engine(family, pages=30)
    paused = machine.submit(wish, NoText())
    with torch.inference_mode():
        while len(paused.answer) < 40:
            machine.step()
    machine.pause(paused)
    beside = machine.submit(other, NoText())
    finish(machine, [beside])
    machine.release(beside)
    parked = paused.cache.parked
    assert parked is not None
    for keys, _ in parked.contents:
        assert keys.shape[1] <= -(-paused.cache.length // PAGE) < len(parked.blocks[0])
    machine.unpause(paused)
    finish(machine, [paused])
    assert paused.answer == alone
    machine.release(paused)
    machine.pool.check([])


def test_copies_for_those_who_wait_have_a_limit(target: Decoder) -> None:
    """Beyond it the next waits until somebody goes on or leaves; who runs already is never cut short for it."""
    machine = engine(target, pages=20)
    paused: list[Sequence] = []
    for first in (5, 6):
        paused.append(machine.submit(request([first, 7, 8], max_tokens=100), NoText()))
        while len(paused[-1].answer) < 10:
            machine.step()
        machine.pause(paused[-1])
    machine.scheduler.parked_limit = machine.pool.parked_bytes  # the second one's room was the first one's
    assert machine.scheduler.parked_limit > 0
    waits = machine.submit(request([9, 10, 11], max_tokens=100), NoText())
    for _ in range(5):
        machine.step()
    assert waits.status is Status.WAITING and paused[1].cache.parked is None
    assert machine.scheduler.idle  # rounds with nobody in them would keep a core busy until somebody leaves
    machine.release(paused[0])
    assert not machine.scheduler.idle
    machine.step()
    assert waits.status is Status.RUNNING and paused[1].cache.parked is not None
    for sequence in (paused[1], waits):
        machine.release(sequence)
    machine.pool.check([])


def test_eighty_answers_that_nobody_reads(target: Decoder) -> None:
    """They give way to one that is read; whoever reads later gets all of it."""
    wishes = [request([5 + n, 6, 7], max_tokens=200, seed=n, temperature=0.8) for n in range(80)]
    one = request([100, 101], max_tokens=20)
    machine = language_model(target).engine
    alone = [run(machine, wish)[0].answer for wish in wishes[::10]]
    (expected,) = run(machine, one)

    async def main() -> None:
        model = language_model(target, pages=120)  # room for four
        async with serving(model, max_running=64) as local:
            answers = [answer for n in range(20) for answer in await local.start([*map(work, wishes[4 * n :][:4])])]
            assert tokens(await ask(local, one)) == expected.answer
            active = model.engine.scheduler.active
            await until(lambda: len(active) == 80 and all(s.status is Status.PAUSED for s in list(active)), 20_000)
            assert max(len(sequence.answer) for sequence in active) < 120
            assert [tokens(await read(answer)) for answer in answers[::10]] == alone
            for answer in answers:
                await answer.close()

    asyncio.run(main())


def ask_and_do_not_read(address: str, body: dict[str, Any]) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    reader.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    reader.settimeout(20)
    return reader


def read_all(reader: socket.socket) -> str:
    parts = []
    with reader:
        while part := reader.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).partition(b"\r\n\r\n")[2].decode()


def test_sockets_that_nobody_reads(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's buffers took answers of thousands of tokens: they ran to their end, and everybody else waited."""
    monkeypatch.setattr(connection, "STALLED", 300.0)  # on a busy machine nobody is hung up on
    model = language_model(target, context=1000, pages=280)  # room for four
    local, settings = LocalEngine(ServeSettings()), ServeSettings()
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, settings))
    bodies = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}], "n": 4, "seed": n, "max_tokens": 500} for n in range(4)
    ]
    with live(create_app(service, settings)) as address:
        readers = [ask_and_do_not_read(address, {**body, "ignore_eos": True, "stream": True}) for body in bodies]
        wait_until(lambda: len(local._answers) == 16)
        reply = call(address, "/v1/chat/completions", {**bodies[0], "n": 1, "max_tokens": 5})
        assert reply.status == 200
        active = model.engine.scheduler.active
        wait_until(lambda: len(active) == 16 and all(s.status is Status.PAUSED for s in list(active)), 60)
        assert max(len(sequence.answer) for sequence in active) < 350
        for reader in readers[1:]:
            reader.close()
        chunks = [json.loads(chunk) for chunk in events_of(read_all(readers[0])) if chunk != "[DONE]"]
        whole = call(address, "/v1/chat/completions", {**bodies[0], "ignore_eos": True}).json
        for number, choice in enumerate(whole["choices"]):
            assert choice["finish_reason"] == "length"
            assert text_of(chunks, choice=number) == choice["message"]["content"]
        wait_until(lambda: not local._answers)
    asyncio.run(local.close())
    assert model.engine.pool.free == model.engine.pool.count and not model.engine.pool.parked_bytes


class GoneSocket:
    """Of a client that has hung up before anybody looked: some systems then refuse to set anything."""

    family = socket.AF_INET

    def setsockopt(self, *_: object) -> None:
        raise OSError(22, "Invalid argument")

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8000)

    getpeername = getsockname


class GoneTransport:
    def __init__(self) -> None:
        self.limits: dict[str, int] = {}

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return GoneSocket() if name == "socket" else default

    def set_write_buffer_limits(self, **limits: int) -> None:
        self.limits = limits

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def test_a_client_that_is_gone_already_has_limits_like_others() -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None: ...

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        connection, transport = Connection(config, ServerState(), {}), GoneTransport()
        connection.connection_made(transport)
        assert transport.limits and connection._timer is not None
        connection.connection_lost(None)

    asyncio.run(main())
