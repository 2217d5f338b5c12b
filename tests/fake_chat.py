"""A chat service that plays a script, behind a real server with nothing but the routes under test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from serve_fakes import live

from forerun.serve.chat_events import ChatEvent, Delta, Finished, Summary, TokenInfo, ToolCallDelta, Usage
from forerun.serve.chat_job import ChatJob
from forerun.serve.error_bodies import CatchAll, add_error_handlers
from forerun.serve.request_ids import RequestIds
from forerun.serve.settings import ServeSettings

Script = Sequence[ChatEvent | Exception | str]  # "wait": until `FakeChatService.go_on` is set
STATISTICS = {"forerun": {"tokens_per_round": 2.5}, "metrics": {}, "timings": {"draft_n": 3, "draft_n_accepted": 2}}
SUMMARY = Summary(Usage(prompt=11, completion=7, reasoning=2, cached=4), STATISTICS)


def token(text: str, logprob: float) -> TokenInfo:
    return TokenInfo(
        1, text, text.encode(), "model", 0, logprob, [(1, text, text.encode(), logprob), (2, "!", b"!", -9)]
    )


def says(*texts: str) -> list[ChatEvent]:
    return [Delta(0, content=text) for text in texts]


def thinks(*texts: str) -> list[ChatEvent]:
    return [Delta(0, reasoning=text) for text in texts]


def calls(index: int, name: str, *arguments: str) -> list[ChatEvent]:
    first = Delta(0, tool_call=ToolCallDelta(index, f"call_{index}", name))
    return [first, *(Delta(0, tool_call=ToolCallDelta(index, arguments=text)) for text in arguments)]


def ends(reason: Any = "stop", stop: str | int | None = None) -> list[ChatEvent]:
    return [Finished(0, reason, stop), SUMMARY]


class FakeRun:
    """Plays one script."""

    id, created, prompt_tokens = "abc", 1_790_000_000, 11

    def __init__(self, service: FakeChatService, script: Script) -> None:
        self.model, self._service, self._script = service.model, service, script

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        for event in self._script:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, str):
                while not self._service.go_on.is_set():
                    await asyncio.sleep(0.005)
                continue
            yield event

    async def close(self) -> None:
        self._service.closed.set()


class FakeChatService:
    """Remembers the jobs it was given."""

    model = "tiny"

    def __init__(self) -> None:
        self.jobs: list[ChatJob] = []
        self.play([])

    def play(self, script: Script) -> None:
        """For the next jobs. An error that comes alone is raised before anything starts."""
        self.script = script
        self.closed, self.go_on = threading.Event(), threading.Event()

    @property
    def job(self) -> ChatJob:
        return self.jobs[-1]

    async def start(self, job: ChatJob) -> FakeRun:
        self.jobs.append(job)
        if len(self.script) == 1 and isinstance(self.script[0], Exception):
            raise self.script[0]
        return FakeRun(self, self.script)

    async def count_tokens(self, job: ChatJob) -> int:
        self.jobs.append(job)
        return sum(len(message["content"].split()) for message in job.messages) + len(job.tools)


@contextmanager
def played(router: Callable[[Any, ServeSettings], APIRouter], **settings: Any) -> Iterator[tuple[FakeChatService, str]]:
    """A service and the address of one router over it."""
    service = FakeChatService()
    app = FastAPI()
    app.include_router(router(service, ServeSettings(**settings)))
    add_error_handlers(app)
    app.add_middleware(CatchAll)
    app.add_middleware(RequestIds)
    with live(app) as url:
        yield service, url
