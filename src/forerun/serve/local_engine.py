"""The engine in this process: one event loop asks, one thread runs rounds."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

from forerun.engine.request import Request
from forerun.engine.thread import EngineThread
from forerun.engine.warmup import warm_up
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel
from forerun.progress import NullProgress, Progress
from forerun.serve.daemon_threads import beside
from forerun.serve.engine_client import EngineState, Work
from forerun.serve.engine_room import EngineRoom
from forerun.serve.errors import ApiError, bad_request, try_later
from forerun.serve.generation import too_long
from forerun.serve.local_answer import LocalAnswer
from forerun.serve.readings import Readings
from forerun.serve.settings import ServeSettings
from forerun.serve.tally import AnswerTotals, Tally, Times

log = logging.getLogger("forerun")
LONGEST_WAIT = 60  # seconds that a client is told to wait, at most
END = 10.0  # seconds for the engine's thread to end; a device that hangs does not keep the process


class LocalEngine:
    """An `EngineClient`. It may be made before there is a model: it is loading until `load` or `open` is done."""

    def __init__(
        self, settings: ServeSettings | None = None, opened: Callable[[LanguageModel], None] = lambda _: None
    ) -> None:
        """`opened`: gets the model before its engine runs."""
        self.settings, self._opened = settings or ServeSettings(), opened
        self.model: LanguageModel | None = None
        self.tally = Tally()
        self._status: Literal["loading", "ready", "draining", "broken"] = "loading"
        self._room: EngineRoom | None = None
        self._thread: EngineThread | None = None
        self._answers: set[LocalAnswer] = set()  # not ended and not closed
        self._places = self.settings.max_running  # answers that may be in the making at once
        self._empty: asyncio.Event | None = None  # set when there are none left, while somebody waits for that

    async def load(self, make: Callable[[], LanguageModel], progress: Progress | None = None) -> LanguageModel:
        """Make the model and warm it up beside the event loop; then it is ready. A failure is raised, and broken."""

        def prepare() -> LanguageModel:
            model = make()
            batch = min(self.settings.max_running, model.engine.scheduler.max_sequences)
            for filtered in (False, True):
                warm_up(model.engine, filtered, progress or NullProgress(), batch)
            # All that was loaded stays: a full collection stops all answers for 0.1 s, and need not look at it.
            gc.collect()
            gc.freeze()
            return model

        try:
            model = await beside(prepare)
        except BaseException:
            self._status = "broken"
            raise
        self.open(model)
        return model

    def open(self, model: LanguageModel) -> None:
        """Serve a model that is loaded. From now on nobody else may use its engine."""
        assert self._thread is None, "one model"
        self._opened(model)
        scheduler = model.engine.scheduler
        if scheduler.max_sequences < self.settings.max_running:
            log.warning("at most %d answers can be in the making at once", scheduler.max_sequences)
        scheduler.max_sequences = self._places = min(scheduler.max_sequences, self.settings.max_running)
        self.model, self._room = model, EngineRoom(model, self.tally, self._answers.discard)
        self._thread = EngineThread(model.engine, self._room.delivered, died=self._died)
        self._status = "ready"

    async def start(self, work: Sequence[Work]) -> Sequence[LocalAnswer]:
        """Queue the choices of one request, all or none."""
        room, thread = self._ready()
        for one in work:
            check(room.model, one.request)
        self._refuse_if_full(room, len(work))
        now, loop = time.perf_counter(), asyncio.get_running_loop()
        answers = [LocalAnswer(self, loop, one, Times(now)) for one in work]
        if not thread.post(partial(room.submit, answers)):
            raise unavailable("the engine has stopped")
        for answer in answers:
            self._answers.add(answer)
            answer.after(self.settings.queue_timeout, partial(self._waited_too_long, answer))
            answer.after(self.settings.request_timeout, partial(self._took_too_long, answer))
        return answers

    def _ready(self) -> tuple[EngineRoom, EngineThread]:
        if self._status == "broken":
            raise ApiError(503, "the engine is broken: restart the server", code="engine_broken")
        if self._status == "draining":
            raise unavailable("the server is shutting down")
        if self._room is None or self._thread is None:
            raise unavailable("the model is still loading")
        return self._room, self._thread

    def _refuse_if_full(self, room: EngineRoom, more: int) -> None:
        """What finds a place in the rounds at once does not wait; where somebody waits for memory, nobody does."""
        most = self.settings.max_queue + self._places
        if more > most:  # not even if nobody else were there: trying again would not help
            raise bad_request(f"these are {more} answers, and the server makes and queues {most} at most", "n")
        waiting = sum(answer.waits for answer in self._answers.copy())
        free = 0 if room.blocked else max(0, self._places - (len(self._answers) - waiting))
        if waiting + more > self.settings.max_queue + free:
            seconds = self.tally.mean_seconds * max(1, waiting) / self._places
            wait = min(LONGEST_WAIT, max(1, math.ceil(seconds)))
            raise try_later(429, f"{waiting} answers are waiting already: try again later", "queue_full", wait)

    def _waited_too_long(self, answer: LocalAnswer) -> None:
        if answer.waits:
            message = f"it waited {self.settings.queue_timeout:g} seconds for its turn: try again later"
            answer.fail(try_later(503, message, "queue_timeout", LONGEST_WAIT))

    def _took_too_long(self, answer: LocalAnswer) -> None:
        message = f"it took longer than {self.settings.request_timeout:g} seconds: ask for fewer tokens"
        answer.fail(ApiError(504, message, code="request_timeout"))

    def hold(self, answer: LocalAnswer, held: bool) -> None:
        """Its reader does not keep up, or does again."""
        if answer in self._answers and self._room is not None and self._thread is not None:
            self._thread.post(partial(self._room.hold, answer, held))

    def over(self, answer: LocalAnswer, abandoned: bool) -> None:
        """It has ended; `abandoned`: its reader wants no more, whatever the engine still does."""
        known = answer in self._answers
        self._answers.discard(answer)
        if abandoned and known and self._room is not None and self._thread is not None:
            self._thread.post(partial(self._room.release, answer))
        if not self._answers and self._empty is not None:
            self._empty.set()

    def state(self) -> EngineState:
        """As things are now; any thread may ask."""
        now = time.perf_counter()
        answers = [answer for answer in self._answers.copy() if not answer.times.ended]
        waiting = sum(answer.waits or answer.is_parked for answer in answers)
        recent, pool = self.tally.recent.sum(now), None if self.model is None else self.model.engine.pool
        return EngineState(
            status=self._status,
            running=len(answers) - waiting,
            waiting=waiting,
            cache_usage=0.0 if pool is None else 1 - pool.free / pool.count,
            tokens_per_second=recent.tokens / max(1.0, now - recent.began),
            accepted_share=recent.accepted / recent.drafted if recent.drafted else None,
            tokens_per_round=1 + recent.accepted / recent.rounds if recent.rounds else None,
            arms=dict(self.totals().arms),
            warnings=() if self.model is None else tuple(self.model.engine.low_acceptance.warnings),
        )

    def readings(self) -> Readings:
        """For /metrics; any thread may ask."""
        engine = None if self.model is None else self.model.engine
        return Readings(
            state=self.state(),
            totals=self.totals(),
            histograms={name: one.snapshot() for name, one in self.tally.histograms.items()},
            reasons=self.tally.reasons.copy(),
            preemptions=0 if engine is None else engine.scheduler.preemptions,
            page=0 if engine is None else engine.pool.page,
            pages=0 if engine is None else engine.pool.count,
        )

    def totals(self) -> AnswerTotals:
        """Of all answers since the start."""
        return self.tally.totals({} if self._room is None else self._room.answers)

    async def drain(self, timeout: float) -> None:
        """Refuse what is new, let the others finish for so long, stop the rest, and end the thread."""
        if self._status != "broken":
            self._status = "draining"
        if self._answers and timeout > 0:
            self._empty = self._empty or asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), timeout)
            except TimeoutError:
                log.warning("%d answers were stopped: they took too long to finish", len(self._answers))
        await self.close()

    async def close(self) -> None:
        """Stop what still runs, and end the thread."""
        if self._status != "broken":
            self._status = "draining"
        for answer in list(self._answers):
            answer.fail(unavailable("the server is shutting down"))
        ended = self._thread is None or await beside(partial(self._thread.close, END))
        gc.unfreeze()
        if self.model is not None:
            self.model.keep_costs()
            if ended and self._status != "broken":  # else nobody knows what state the engine is in
                await beside(self.model.close)

    def _died(self, error: BaseException) -> None:
        """On the engine's thread, at its end."""
        self._status = "broken"
        answers = list(self._answers)
        for loop in {answer.loop for answer in answers}:
            mine = [answer for answer in answers if answer.loop is loop]
            with suppress(RuntimeError):  # it is closed: nobody reads any more
                loop.call_soon_threadsafe(partial(fail_all, mine, type(error).__name__))


def fail_all(answers: Sequence[LocalAnswer], reason: str) -> None:
    """The engine is broken."""
    for answer in answers:
        answer.fail(ApiError(500, f"the engine broke while it answered ({reason})", code="engine_broken"))


def check(model: LanguageModel, request: Request) -> None:
    """Refuse what can never run."""
    if len(request.prompt) >= model.engine.longest:
        raise too_long(model.engine.longest, len(request.prompt), "prompt")
    drafters = model.engine.drafters
    if request.draft not in ("auto", "off") and request.draft not in drafters:
        known = ", ".join(("auto", "off", *drafters.by_name))  # why it is not there names files: not for clients
        raise bad_request(f"no {request.draft} drafter is loaded here: use one of {known}", "speculative")
    try:
        model.engine.check(request)
    except ForerunError as error:
        raise bad_request(str(error)) from error


def unavailable(message: str) -> ApiError:
    """Not now."""
    return try_later(503, f"{message}: try again later")
