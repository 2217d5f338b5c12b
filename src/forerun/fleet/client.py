"""The front's half of a fleet: an `EngineClient` whose engines are replicas somewhere else.

A request goes to one replica with all its choices. If that replica is lost before it has said anything, the request
goes to another one, and its client notices nothing; after that its answer ends with one clear error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Protocol

from forerun.engine.sequence import Emission, Logprob
from forerun.fleet.routing import Route, chain_of
from forerun.fleet.wire import Accepted, ChoiceEmissions, ChoiceEnded, ChoicePromptRead, Item, OtherModel, pack
from forerun.serve.engine_client import Ended, EngineState, PromptRead, Work
from forerun.serve.errors import ApiError, try_later
from forerun.serve.readings import Readings, together
from forerun.serve.settings import ServeSettings

log = logging.getLogger("forerun")

TRIES = 8  # replicas that may be lost under one request
BACKOFF, LONGEST_BACKOFF = 0.05, 1.0  # seconds before the next one
LATE = 5.0  # seconds that a replica has to say itself that a request took too long

session: ContextVar[str] = ContextVar("session", default="")  # of the request being served, by its header


class ReplicaLost(Exception):
    """It will not answer any more, nor will what was asked of it."""


class Replicas(Protocol):
    """Calls the replica that the route leads to."""

    def answer(self, data: bytes, fingerprint: str, route: Route) -> AsyncGenerator[Item, None]:
        """See `Replica.answer`; `ReplicaLost` when its end will not come, `ApiError` when there is no place for it."""
        ...


class FleetEngine:
    """An `EngineClient`."""

    def __init__(self, replicas: Replicas, settings: ServeSettings) -> None:
        self._replicas, self.settings = replicas, settings
        self.fingerprint: str | None = None  # of the model, once a replica is there
        self.latest: Sequence[Readings] = ()  # of each replica, as they were a moment ago
        self._calls: set[Call] = set()

    async def start(self, work: Sequence[Work]) -> Sequence[FleetAnswer]:
        """Queue the choices of one request, all or none."""
        if self.fingerprint is None:
            raise try_later(503, "the model is still loading: try again later")
        route = Route(chain_of(work[0].request.prompt), session.get(), self.fingerprint)
        call = Call(self._replicas, work, pack(work), self.fingerprint, route, self.settings)
        self._calls.add(call)
        call.task.add_done_callback(lambda _: self._calls.discard(call))
        try:
            await call.begun()
        except BaseException:
            call.close()
            raise
        return call.answers

    def state(self) -> EngineState:
        """Of all replicas together, and of what waits here for one of them."""
        if self.fingerprint is None:
            return EngineState("loading")
        if not self.latest:
            return EngineState("ready", waiting=len(self._calls))
        state, queued = together(self.latest).state, sum(not call.accepted for call in self._calls)
        return replace(state, status="ready", waiting=state.waiting + queued)

    def readings(self) -> Readings:
        """For /metrics."""
        return replace(together(self.latest), state=self.state()) if self.latest else Readings(self.state())

    async def close(self) -> None:
        """Stop what still runs."""
        for call in list(self._calls):
            call.fail(try_later(503, "the server is shutting down: try again later"))


class Call:
    """One request on its way: its choices on one replica, or on the next one."""

    def __init__(
        self,
        replicas: Replicas,
        work: Sequence[Work],
        data: bytes,
        fingerprint: str,
        route: Route,
        settings: ServeSettings,
    ) -> None:
        self.answers = [FleetAnswer(self, one) for one in work]
        self.accepted = False
        self._replicas, self._data, self._fingerprint, self._route = replicas, data, fingerprint, route
        self._settings = settings
        self._said = False
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = loop.create_future()  # it was accepted, or refused
        self._timer = loop.call_later(settings.request_timeout + LATE, self._took_too_long)
        self.task = asyncio.ensure_future(self._run())

    async def begun(self) -> None:
        """Wait until a replica has accepted it."""
        await asyncio.wait({self._first}, timeout=self._settings.queue_timeout)
        if not self._first.done():
            seconds = self._settings.queue_timeout
            raise try_later(503, f"it waited {seconds:g} seconds for its turn: try again later", "queue_timeout", 60)
        self._first.result()

    async def _run(self) -> None:
        try:
            for attempt in range(TRIES):
                try:
                    await self._once()
                    return
                except ReplicaLost as lost:
                    log.warning("a replica was lost: %s", lost)
                    if self._said:
                        break
                    await asyncio.sleep(min(LONGEST_BACKOFF, BACKOFF * 2**attempt))
            self.fail(try_later(503, "the replica that made this answer was lost: try again", "replica_lost", 1))
        except ApiError as error:
            self.fail(error)
        except Exception as error:
            log.exception("a request to a replica failed")
            self.fail(ApiError(500, f"the fleet failed on this request ({type(error).__name__})", code="fleet_failed"))
        finally:
            self._timer.cancel()
            if not self._first.done():
                self._first.cancel()

    async def _once(self) -> None:
        async with contextlib.aclosing(self._replicas.answer(self._data, self._fingerprint, self._route)) as items:
            async for item in items:
                if isinstance(item, OtherModel):
                    raise ReplicaLost("it has another model")
                if isinstance(item, Exception):
                    raise item
                self._take(item)
        if not all(answer.over for answer in self.answers):
            raise ReplicaLost("it stopped in the middle")

    def _take(self, item: Accepted | ChoicePromptRead | ChoiceEmissions | ChoiceEnded) -> None:
        if isinstance(item, Accepted):
            self.accepted = True
            if not self._first.done():
                self._first.set_result(None)
            return
        answer = self.answers[item.choice]
        if isinstance(item, ChoicePromptRead):
            answer.read(item.progress)
            return
        self._said = True
        if isinstance(item, ChoiceEnded):
            answer.end(item.ended)
        else:
            answer.say(item)

    def _took_too_long(self) -> None:
        seconds = self._settings.request_timeout
        message = f"it took longer than {seconds:g} seconds: ask for fewer tokens"
        self.fail(ApiError(504, message, code="request_timeout"))

    def fail(self, error: Exception) -> None:
        """Whoever waits for it gets the error after what came before."""
        if not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # an error that is not waited for any more is no oversight
        for answer in self.answers:
            answer.end(error)
        self.stop()

    def close(self) -> None:
        """Nobody wants it any more."""
        for answer in self.answers:
            answer.drop()
        self.stop()

    def stop(self) -> None:
        """When no choice is left."""
        if all(answer.over for answer in self.answers) and self.task is not asyncio.current_task():
            self.task.cancel()


class FleetAnswer:
    """One choice, as its reader sees it. Its text is made here, when it is read."""

    def __init__(self, call: Call, work: Work) -> None:
        self.prompt_logprobs: Sequence[Logprob] = ()
        self.over = False  # nothing more will come
        self._call, self._work = call, work
        self._items: deque[PromptRead | list[Emission] | Ended | Exception] = deque()
        self._there = asyncio.Event()
        self._text: list[str] = []

    def say(self, item: ChoiceEmissions) -> None:
        """What its replica sent; rounds that were not read yet become one."""
        if self.over:
            return
        self.prompt_logprobs = item.prompt_logprobs or self.prompt_logprobs
        latest = self._items[-1] if self._items else None
        if isinstance(latest, list):
            latest += item.emissions
        else:
            self._items.append(list(item.emissions))
        self._there.set()

    def read(self, progress: PromptRead) -> None:
        """How far its prompt has been read; when another replica reads it, from the beginning again."""
        if not self.over:
            self._items.append(progress)
            self._there.set()

    def end(self, how: Ended | Exception) -> None:
        """Nothing more comes after this."""
        if not self.over:
            self.over = True
            self._items.append(how)
            self._there.set()

    def drop(self) -> None:
        """Nobody reads any more."""
        self.over = True
        self._items.clear()
        self._there.set()

    async def close(self) -> None:
        """Stop it; the replica hears of it when all choices of the request are over. Safe any number of times."""
        self.drop()
        self._call.stop()

    def __aiter__(self) -> AsyncIterator[PromptRead | Sequence[Emission] | Ended]:
        return self

    async def __anext__(self) -> PromptRead | Sequence[Emission] | Ended:
        while not self._items:
            if self.over:
                raise StopAsyncIteration
            self._there.clear()
            await self._there.wait()
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, PromptRead):
            return item
        return self._ended(item) if isinstance(item, Ended) else self._with_text(item)

    def _with_text(self, emissions: list[Emission]) -> list[Emission]:
        sink = self._work.sink
        for emission in emissions:
            emission.text, _ = sink.push(emission.token)
            self._text.append(emission.text)
        return emissions

    def _ended(self, ended: Ended) -> Ended:
        tail = self._work.sink.flush()
        return replace(ended, tail=tail, response=replace(ended.response, text="".join([*self._text, tail])))
