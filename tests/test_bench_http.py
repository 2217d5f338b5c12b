"""`forerun bench --url` against a small server whose answers are known: counts, times, texts, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.bench import http_load
from forerun.bench.http_client import Address, HttpError
from forerun.bench.http_load import Answer, Job, LoadCell, ask, closed_loop, compare, make_jobs, to_data
from forerun.bench.http_report import row
from forerun.bench.workloads import load_workloads
from forerun.cli.main import main
from forerun.errors import ForerunError

JOB = Job("one", [{"role": "user", "content": "hi"}], 8, 0.0, 1)


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

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length))
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

    def events(self, body: dict[str, Any]) -> bytes:
        words = ["so ", "it ", "is", "!" if self.lies and body["speculative"] == "auto" else "."]
        said = [{"choices": [{"delta": {"content": word}}], "usage": None} for word in words]
        events = [*said, {"choices": [], "usage": {"completion_tokens": 6}}]
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
    answer = asyncio.run(ask(Address.of(url + "/v1", "key"), JOB, "off"))
    assert answer.text == "so it is." and answer.tokens == 6 and len(answer.gaps) == 3
    assert 0 < answer.first <= answer.seconds
    (body,) = fake.bodies
    assert body["speculative"] == "off" and body["max_completion_tokens"] == 8 and body["seed"] == 1
    assert fake.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer key\r\n" in fake.heads[0]


def test_times_are_those_of_the_pieces(server: tuple[FakeServer, str]) -> None:
    """Of their arrival, although they are read at the end."""
    fake, url = server
    fake.pause = 0.2
    answer = asyncio.run(ask(Address.of(url), JOB, "off"))
    assert answer.text == "so it is." and answer.first < 0.15
    assert answer.gaps[0] > 0.15 and max(answer.gaps[1:]) < 0.15 and sum(answer.gaps) <= answer.seconds


def test_errors_are_one_line(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.error = {"message": "out of memory"}
    with pytest.raises(ForerunError, match="out of memory"):
        asyncio.run(ask(Address.of(url), JOB, "off"))
    fake.status = 429
    with pytest.raises(HttpError, match=r"answers 429: No\."):
        asyncio.run(ask(Address.of(url), JOB, "off"))
    with pytest.raises(ForerunError, match=r"no answer from 127\.0\.0\.1:1"):
        asyncio.run(ask(Address.of("http://127.0.0.1:1"), JOB, "off"))
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


def test_a_closed_loop_keeps_so_many_busy() -> None:
    jobs = [Job(str(number), [], 1, 0.0, 0) for number in range(10)]
    now, seen = 0, list[int]()

    async def answer(job: Job) -> Answer:
        nonlocal now
        now += 1
        seen.append(now)
        await asyncio.sleep(0)
        now -= 1
        return Answer(job.id, 1, 0.0, [], 0.0)

    answers, seconds = asyncio.run(closed_loop(jobs, 3, answer))
    assert max(seen) == 3 and sorted(name for name, _ in answers) == sorted(job.id for job in jobs) and seconds > 0


def test_jobs_are_of_all_kinds_and_enough() -> None:
    workloads = load_workloads()
    for clients in (1, 4, 16):
        jobs = make_jobs(workloads, 0.8, clients, full=False)
        assert len(jobs) >= max(20, 3 * clients) and len({job.id for job in jobs}) == len(jobs)
        assert len({job.id.split("-")[0] for job in jobs[:10]}) == 10 and jobs[0].temperature == 0.8
    everything = make_jobs(workloads, 0.0, 1, full=True)
    assert len(everything) == sum(len(workload.prompts) for workload in workloads)


def cell(arm: str, texts: list[str], rates: list[float]) -> LoadCell:
    answers = [(str(number), Answer(text, 5, 0.1, [0.01] * 4, 0.2)) for number, text in enumerate(texts)]
    return LoadCell(4, arm, 0.0, rates, answers)


def test_no_ratio_where_texts_differ() -> None:
    same = {"off": cell("off", ["a", "b"], [10.0, 20.0]), "auto": cell("auto", ["a", "b"], [15.0, 30.0])}
    compare(same)
    assert same["auto"].ratio is not None and same["auto"].ratio.value == 1.5 and same["off"].ratio is None
    assert row(same["auto"])[:3] == ["4", "auto", "22.5"] and row(same["auto"])[-1] == "2 of 2"
    other = {"off": cell("off", ["a", "b"], [10.0, 20.0]), "auto": cell("auto", ["a", "x"], [15.0, 30.0])}
    compare(other)
    assert other["auto"].ratio is None and row(other["auto"])[3] == "–" and row(other["auto"])[-1] == "1 of 2"
    (_, found) = to_data(list(other.values()))
    assert found["ratio"] is None and found["equal"] == 1
    assert found["first_token_seconds"]["p99"] == 0.1 and found["inter_token_seconds"]["p50"] == 0.01


def test_the_command(
    server: tuple[FakeServer, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = server
    monkeypatch.setattr(http_load, "TURNS", 2)
    assert main(["bench", "--url", url, "-w", "questions", "--clients", "1,4", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["clients"], one["arm"]) for one in cells] == [(1, "off"), (1, "auto"), (4, "off"), (4, "auto")]
    assert all(one["equal"] == one["total"] and one["tokens_per_second"] > 0 for one in cells)
    assert cells[1]["ratio"] is not None and fake.most == 4
    fake.lies = True
    assert main(["bench", "--url", url, "-w", "questions", "--clients", "2", "--temp", "0.8"]) == 0
    out = capsys.readouterr().out
    assert "temperature 0.8" in out and "no ratio where the texts differ" in out and "0 of" in out


def test_what_is_refused(server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    fake, url = server
    for arguments, said in {
        ("--url", url, "-m", "x"): "--model has no meaning with --url",
        ("--url", url, "--plot", "x.png"): "--plot has no meaning",
        ("--url", url, "--clients", "0"): "--clients 0",
        ("--url", url, "--clients", "1,x"): "--clients 1,x",
        ("--clients", "2"): "give its address with --url",
        ("--url", "nowhere"): "--url nowhere",
    }.items():
        assert main(["bench", *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    fake.status = 503
    assert main(["bench", "--url", url, "--clients", "2"]) == 2
    assert capsys.readouterr().err == "forerun: the server answers 503: No.\n"
