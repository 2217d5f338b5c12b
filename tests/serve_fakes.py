"""A server for tests: an engine that says what a test tells it to, and uvicorn on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from tiny import tiny_tokenizer

from forerun.engine.sequence import ArmUse, Emission, Logprob
from forerun.response import Response
from forerun.serve.app import create_app
from forerun.serve.connection import Connection
from forerun.serve.engine_client import Ended, EngineState, PromptRead, Work
from forerun.serve.errors import ApiError
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.settings import ServeSettings

END = 2  # <|im_end|>
CONTEXT = 2048


@dataclass
class FakeEngine:
    """Answers with `say(work)` in rounds of several tokens; can wait, fail, and tell what was closed."""

    say: Callable[[Work], str] = lambda work: "Hello there, world."
    per_round: int = 3
    pause: float = 0.0  # seconds before each round
    fail_after: int | None = None  # rounds
    fail_at_start: ApiError | None = None
    status: Any = "ready"
    tokenizer: Any = field(default_factory=tiny_tokenizer)
    started: list[Work] = field(default_factory=list)
    closed: int = 0
    running: int = 0

    async def start(self, work: Sequence[Work]) -> list[FakeAnswer]:
        if self.fail_at_start is not None:
            raise self.fail_at_start
        self.started += work
        self.running += len(work)
        return [FakeAnswer(self, item) for item in work]

    def state(self) -> EngineState:
        return EngineState(self.status, running=self.running, cache_usage=0.25, tokens_per_second=12.5)


class FakeAnswer:
    """Tokens of the scripted text through the request's own sink, as the engine would emit them."""

    def __init__(self, engine: FakeEngine, work: Work) -> None:
        self._engine, self._work, self._closed = engine, work, False
        asked = work.request.prompt_logprobs
        self.prompt_logprobs = [Logprob(-1.0, [(5, -0.5)]) for _ in work.request.prompt[1:]] if asked else []

    async def __aiter__(self) -> AsyncIterator[PromptRead | list[Emission] | Ended]:
        engine, request = self._engine, self._work.request
        for read in (2, len(request.prompt)) if self._work.progress else ():
            yield PromptRead(read, len(request.prompt), read / 1000)
        tokens = [*engine.tokenizer(engine.say(self._work), add_special_tokens=False)["input_ids"]]
        said: list[int] = []
        text, reason, stop = "", "length", None
        rounds = 0
        emissions: list[Emission] = []
        for token in [*tokens, END]:
            if token in request.stop_ids:
                reason, stop = "stop", token
                break
            said.append(token)
            shown, stopped = self._work.sink.push(token)
            text += shown
            last = len(emissions) == engine.per_round - 1
            emission = Emission(token, shown, not last, "" if last else "lookup", rounds)
            if request.logprobs is not None:
                top = [(token, -0.25), (5, -1.5), (6, -2.5)] + [(7 + n, -3.0 - n) for n in range(20)]
                emission.logprob = Logprob(-0.25, top[: request.logprobs])
            emissions.append(emission)
            if stopped:
                reason = "stop"
            if stopped or len(said) == request.max_tokens:
                break
            if len(emissions) == engine.per_round:
                yield await self._round(emissions, rounds)
                emissions, rounds = [], rounds + 1
        if emissions:
            yield await self._round(emissions, rounds)
        tail = self._work.sink.flush()
        yield Ended(reason, tail, self._response(text + tail, said, reason, rounds), stop, 0.001, 0.002)

    async def _round(self, emissions: list[Emission], rounds: int) -> list[Emission]:
        await asyncio.sleep(self._engine.pause)
        if self._engine.fail_after is not None and rounds >= self._engine.fail_after:
            raise RuntimeError("a secret at /some/path and 0xdeadbeef")
        return emissions

    def _response(self, text: str, said: list[int], reason: str, rounds: int) -> Response:
        request = self._work.request
        drafted = rounds * 2
        return Response(
            text, said, reason, len(request.prompt), len(said), rounds, drafted, drafted,
            {"load": 0.0, "prefill": 0.5, "decode": 1.0, "draft": 0.1, "verify": 0.9}, 20.0, "lookup", True,
            request.sampling.seed, {"lookup": ArmUse(rounds, drafted, drafted, 1.0)},
            [[rounds, rounds], [rounds, rounds]] if rounds else [], 0.5, [],
        )  # fmt: skip

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.closed += 1
            self._engine.running -= 1


def loaded(engine: FakeEngine, **more: Any) -> LoadedModel:
    return LoadedModel(tokenizer=engine.tokenizer, context=CONTEXT, vocab=290, stop_ids=frozenset({0, END}), **more)


def app_for(engine: FakeEngine, settings: ServeSettings | None = None, **more: Any) -> Any:
    return create_app(ModelService("tiny", engine, ("org/tiny",), loaded(engine, **more)), settings or ServeSettings())


@contextlib.contextmanager
def live(app: Any) -> Iterator[str]:
    """Serves on a free port; gives the address without a path."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=0, log_level="warning", lifespan="on", timeout_graceful_shutdown=2, http=Connection, ws="none"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server does not end"


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for something that happens on another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


@dataclass
class Reply:
    """A response as it came."""

    status: int
    headers: dict[str, str]  # names in small letters
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        return found


def call(
    address: str, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> Reply:
    """One request with nothing added but what is given; a body that is not bytes or text becomes JSON."""
    host, port = address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    sent |= headers or {}
    data = body if isinstance(body, bytes | str | None) else json.dumps(body)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
        response = connection.getresponse()
        text = response.read().decode()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, text)
    finally:
        connection.close()
