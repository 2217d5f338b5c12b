"""`forerun bench --url` against a small server whose answers are known: counts, times, texts, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.bench import load
from forerun.bench.http_client import Address, HttpError
from forerun.bench.http_load import HttpTarget
from forerun.bench.load import Job, TimedAnswer
from forerun.cli.main import main
from forerun.errors import ForerunError

JOB = Job("one", "hi", 8, 0.0, 1)
PROPS = {"version": "1", "settings": {}, "drafters": ["lookup", "mtp"], "device": "cpu"}


def ask(address: Address, arm: str = "off") -> TimedAnswer:
    """Of a server of ours."""
    target = HttpTarget(address, "m", PROPS)
    return asyncio.run(target.answer(JOB, time.perf_counter(), arm))


class FakeServer:
    """Streams a few words back, in chunks cut anywhere, and counts how many it talks to at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.now = self.most = 0
        self.lies = False  # does drafting change the text?
        self.status = 200
        self.error: dict[str, Any] | None = None
        self.pause = 0.0  # seconds in the middle of the answer
        self.statistics: dict[str, Any] = {}  # of ours: what rounds were made of
        self.documents: dict[str, Any] = {"/props": PROPS, "/v1/models": {"data": [{"id": "m"}]}}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        sent = await reader.readexactly(length)
        if head.startswith("GET"):
            self.tell(head.split()[1], writer)
            return
        body = json.loads(sent)
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.002)
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 %d Hm\r\n" % self.status + kind)
        answer = self.events(body) if self.status == 200 else b'{"error": {"message": "No."}}'
        for start in range(0, len(answer), 37):
            part = answer[start : start + 37]
            if start <= answer.find(b"it ") < start + 37:
                await asyncio.sleep(self.pause)
            writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
        writer.write(b"0\r\n\r\n")
        self.now -= 1
        writer.close()

    def tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        status = 404 if self.status == 200 and path not in self.documents else self.status
        said = json.dumps(
            self.documents.get(path, {"error": {"message": "No."}}) if status == 200 else {"error": "No."}
        )
        writer.write(b"HTTP/1.1 %d Hm\r\nContent-Length: %d\r\n\r\n" % (status, len(said)) + said.encode())
        writer.close()

    def events(self, body: dict[str, Any]) -> bytes:
        words = ["so ", "it ", "is", "!" if self.lies and body.get("speculative") == "auto" else "."]
        said = [{"choices": [{"delta": {"content": word}}], "usage": None} for word in words]
        usage = {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 1}}
        events = [*said, {"choices": [], "usage": usage, **self.statistics}]
        if self.error is not None:
            events = [said[0], {"error": self.error}]
        return (
            b": ping\n\n"
            + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
            + (b"data: [DONE]\n\n")
        )


@pytest.fixture
def server() -> Iterator[tuple[FakeServer, str]]:
    """On a loop of its own, as another process would be."""
    fake, loop, ready = FakeServer(), asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def run() -> None:
        listener = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        ports.append(listener.sockets[0].getsockname()[1])
        ready.set()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield fake, f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_an_answer_is_timed_and_put_together(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    answer = ask(Address.of(url + "/v1", "key"))
    assert answer.text == "so it is." and answer.tokens == 6 and len(answer.gaps) <= 3 and answer.first > 0
    (body,) = fake.bodies
    assert body["speculative"] == "off" and body["max_tokens"] == 8 and body["seed"] == 1 and body["model"] == "m"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert fake.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer key\r\n" in fake.heads[0]


def test_rows_are_counted_as_far_as_the_server_tells(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    answer = ask(Address.of(url))
    assert (answer.prompt_rows, answer.other_rows) == (8, 5)  # the first token comes out of the prompt
    fake.statistics = {"forerun": {"rounds": 3}, "metrics": {"speculative_decoding": {"num_draft_tokens": 7}}}
    assert ask(Address.of(url), "mtp").other_rows == 10


def test_a_server_of_another_kind_is_asked_nothing_that_it_does_not_know(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    ours = asyncio.run(HttpTarget.find(Address.of(url)))
    assert ours.arms == ("off", "lookup", "mtp", "auto") and ours.model == "m" and ours.on_cpu
    fake.documents = {"/props": {"default_generation_settings": {}}, "/v1/models": {"data": [{"id": "other"}]}}
    other = asyncio.run(HttpTarget.find(Address.of(url)))
    assert other.arms == ("off",) and not other.on_cpu
    asyncio.run(other.answer(JOB, time.perf_counter(), "off"))
    assert "speculative" not in fake.bodies[-1] and fake.bodies[-1]["model"] == "other"
    fake.documents = {}
    bare = asyncio.run(HttpTarget.find(Address.of(url)))
    asyncio.run(bare.answer(JOB, time.perf_counter(), "off"))
    assert bare.arms == ("off",) and "model" not in fake.bodies[-1]


def test_times_are_those_of_the_pieces(server: tuple[FakeServer, str]) -> None:
    """Of their arrival, although they are read at the end; what comes at once is one arrival."""
    fake, url = server
    fake.pause = 0.2
    answer = ask(Address.of(url))
    assert answer.text == "so it is." and answer.first < 0.15
    assert answer.gaps[0] > 0.15 and max(answer.gaps[1:], default=0) < 0.15 and min(answer.gaps) > 0


def test_errors_are_one_line(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.error = {"message": "out of memory"}
    with pytest.raises(ForerunError, match="out of memory"):
        ask(Address.of(url))
    fake.status = 429
    with pytest.raises(HttpError, match=r"answers 429: No\."):
        ask(Address.of(url))
    with pytest.raises(ForerunError, match=r"no answer from 127\.0\.0\.1:1"):
        ask(Address.of("http://127.0.0.1:1"))
    for url in ("localhost:8000", "http://x:99999", "http://[::1"):
        with pytest.raises(ForerunError, match="--url"):
            Address.of(url)
    assert Address.of("http://[::1]:8000/v1").netloc == "[::1]:8000"


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>"])
def test_what_is_no_server_of_ours_is_one_line(said: bytes) -> None:
    async def run() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as listener:
            await Address("127.0.0.1", listener.sockets[0].getsockname()[1]).fetch("/health")

    with pytest.raises(ForerunError, match="does not answer as a server"):
        asyncio.run(run())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TURNS", 2)
    monkeypatch.setattr(load, "LEAST_JOBS", 4)
    monkeypatch.setattr(load, "LEAST_ARRIVALS", 4)


@pytest.mark.usefixtures("short")
def test_the_command(server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    fake, url = server
    given = ["bench", "--url", url, "-w", "questions", "--clients", "1,4", "--rates", "1", "--temp", "0"]
    assert main([*given, "--json"]) == 0
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])
    arms = ["off", "lookup", "mtp", "auto"]
    assert [(one.get("clients"), one["arm"]) for one in cells] == [(n, arm) for n in (1, 4, None) for arm in arms]
    assert all(one["equal"] == one["total"] and one["tokens_per_second"] > 0 for one in cells)
    assert all(one["ratio"] > 0 for one in cells) and fake.most >= 4
    fake.lies = True
    assert main([*given[:-1], "0.8"]) == 0
    out = capsys.readouterr().out
    assert "temperature 0.8" in out and "no ratio where the texts differ" in out and "0 of" in out


def test_what_is_refused(server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    fake, url = server
    for arguments, said in {
        ("--url", url, "-m", "x"): "--model has no meaning with --url",
        ("--url", url, "--against", "transformers"): "--against compares one answer",
        ("--url", url, "--clients", "0"): "--clients 0",
        ("--url", url, "--clients", "1,x"): "--clients 1,x",
        ("--url", "nowhere"): "--url nowhere",
        ("--url", "http://127.0.0.1:1"): "no answer from 127.0.0.1:1",
    }.items():
        assert main(["bench", *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    fake.status = 503
    assert main(["bench", "--url", url, "--clients", "2"]) == 2
    assert capsys.readouterr().err == "forerun: the server answers 503: No.\n"


def test_clients_that_fail_together_are_one_line(
    server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    fake.error = {"message": "out of memory"}
    assert main(["bench", "--url", url, "--clients", "4"]) == 2
    assert capsys.readouterr().err == "forerun: the server stopped: out of memory\n"
