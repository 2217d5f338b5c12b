"""A server for tests of the page: its real files and headers, scripted answers. A test may hold an answer back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from forerun.serve.routes import page

# A round: who drafted, and its tokens; the last of them is always the model's own.
Round = tuple[str, list[str]]


@dataclass
class Script:
    """What is answered to one question."""

    rounds: list[Round] = field(default_factory=list)
    thinking: list[Round] = field(default_factory=list)
    hold_after: int | None = None  # rounds; then `FakeServer.release` is waited for
    hold_first: bool = False  # before anything is sent
    texts: list[str] | None = None  # of the rounds, where it is not that of their tokens
    delay: float = 0.0  # seconds between rounds
    status: int = 200
    error: dict[str, Any] | None = None  # with a status, or in the middle of the stream
    headers: dict[str, str] = field(default_factory=dict)
    proof: dict[str, Any] | None = None  # where one is asked for; None: identical


@dataclass
class FakeServer:
    """Answers by what the last question holds, and remembers what it was asked."""

    scripts: dict[str, Script] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None
    cancelled: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def script_for(self, body: dict[str, Any]) -> Script:
        question = body["messages"][-1]["content"]
        found = [script for word, script in self.scripts.items() if word in question]
        return found[0] if found else Script([("model", ["You", " said:", " ", question])])


def serve_page(fake: FakeServer) -> FastAPI:
    """The routes that the page knows."""
    app = FastAPI()
    app.include_router(page.router(page.page_files()))

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        closed = request.url.path != "/" and not request.url.path.startswith("/page/")
        if fake.key and closed and request.headers.get("authorization") != f"Bearer {fake.key}":
            return JSONResponse({"error": {"message": "Wrong or missing API key."}}, 401)
        response: Response = await call_next(request)
        return response

    @app.get("/props")
    def props() -> dict[str, Any]:
        defaults = {"temperature": 0.7, "top_p": 0.95, "top_k": 40}
        drafters = ["mtp", "lookup"]
        return {
            "model": "SmolLM2-1.7B-Instruct",
            "context": 8192,
            "drafters": drafters,
            "generation_defaults": defaults,
            "version": "0.2.0",
        }

    @app.get("/stats")
    def stats() -> dict[str, Any]:
        return {
            "status": "ready",
            "running": 0,
            "waiting": 0,
            "cache_usage": 0.0,
            "tokens_per_second": 0.0,
            "accepted_share": None,
            "tokens_per_round": None,
            "arms": {},
            "warnings": [],
        } | fake.stats

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        fake.bodies.append(body)
        script = fake.script_for(body)
        if script.status != 200:
            return JSONResponse({"error": script.error}, script.status, script.headers)
        proves = isinstance(wish := body.get("speculative"), dict) and wish.get("prove", False)
        return StreamingResponse(stream(fake, script, proves), media_type="text/event-stream")

    return app


async def stream(fake: FakeServer, script: Script, proves: bool) -> AsyncIterator[str]:
    """Chunks as the server sends them, one for each round."""
    started = time.perf_counter()
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": None}

    def chunk(delta: dict[str, Any], details: list[dict[str, Any]], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_details": details}
        return f"data: {json.dumps(base | {'choices': [choice]})}\n\n"

    async def hold() -> None:
        try:
            while not fake.release.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:  # the client has left
            fake.cancelled += 1
            raise

    yield ": ping\n\n"
    if script.hold_first:
        await hold()
    yield chunk({"role": "assistant", "content": ""}, [])
    number = 0
    for name, rounds in (("reasoning_content", script.thinking), ("content", script.rounds)):
        for at, (source, texts) in enumerate(rounds):
            sources = [source] * (len(texts) - 1) + ["model"]
            details = [{"text": text, "source": s, "round": number} for text, s in zip(texts, sources, strict=True)]
            yield chunk({name: script.texts[at] if script.texts else "".join(texts)}, details)
            number += 1
            await asyncio.sleep(script.delay)
            if name == "content" and number - len(script.thinking) == script.hold_after:
                await hold()
    if script.error:
        yield f"data: {json.dumps({'error': script.error})}\n\n"
        return
    yield chunk({}, [], "stop")
    last = base | {"choices": []} | summary(script, time.perf_counter() - started)
    if proves:
        tokens = last["usage"]["completion_tokens"]
        last["forerun"]["proof"] = script.proof or {"identical": True, "tokens": tokens}
    yield f"data: {json.dumps(last)}\n\n"
    yield "data: [DONE]\n\n"


def summary(script: Script, seconds: float) -> dict[str, Any]:
    """The last chunk's statistics, counted from the script."""
    rounds = script.thinking + script.rounds
    tokens = sum(len(texts) for _, texts in rounds)
    thought = sum(len(texts) for _, texts in script.thinking)
    accepted = tokens - len(rounds)
    return {
        "usage": {
            "prompt_tokens": 48,
            "completion_tokens": tokens,
            "total_tokens": 48 + tokens,
            "completion_tokens_details": {"reasoning_tokens": thought},
        },
        "timings": {
            "prompt_n": 48,
            "prompt_ms": 120.0,
            "predicted_n": tokens,
            "predicted_per_second": tokens / max(seconds, 0.001),
            "draft_n": accepted + 5,
            "draft_n_accepted": accepted,
        },
        "forerun": {
            "tokens_per_round": tokens / max(len(rounds), 1),
            "seconds_saved": 1.25,
            "seed": 7,
            "guaranteed": True,
            "draft": "auto",
        },
    }


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Serves on a free port, in a thread of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(serve_page(fake), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    try:
        yield fake
    finally:
        server.should_exit = server.force_exit = True
        fake.release.set()
        thread.join(5)
