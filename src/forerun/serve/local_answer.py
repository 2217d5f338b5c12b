"""One answer of the engine in this process, as its reader on the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from forerun.engine.sequence import Emission, Logprob, Status
from forerun.engine.sequence import Sequence as Running
from forerun.serve.engine_client import Ended, PromptRead, Work
from forerun.serve.tally import Times

if TYPE_CHECKING:
    from forerun.serve.local_engine import LocalEngine

MANY, FEW = 64, 16  # tokens that wait for a slow reader: its sequence pauses at many, and goes on at few


class LocalAnswer:
    """Belongs to the loop that asked for it, but for what the engine's thread knows of it: that it alone changes."""

    def __init__(self, keeper: LocalEngine, loop: asyncio.AbstractEventLoop, work: Work, times: Times) -> None:
        self.loop = loop
        self.prompt_logprobs: Sequence[Logprob] = ()
        # The engine's thread:
        self.work, self.times = work, times
        self.sequence: Running | None = None
        self.read = 0  # prompt tokens that the tally knows
        self.texts: list[str] = []
        self.counted = (0, 0, 0)  # rounds, drafted and accepted that the tally knows
        # The loop:
        self._keeper = keeper
        self._items: deque[PromptRead | list[Emission] | Ended] = deque()
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._backlog = 0  # tokens in `_items`
        self._held = False
        self._over = False  # nothing more will come
        self._closed = False  # nothing more will be read

    @property
    def waits(self) -> bool:
        """Has its prompt not been begun?"""
        return self.sequence is None or self.sequence.admitted is None

    @property
    def is_parked(self) -> bool:
        """Does it wait for memory again?"""
        return self.sequence is not None and self.sequence.status is Status.PARKED

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Unless it is over by then."""
        self._timers.append(self.loop.call_later(seconds, act))

    def give(
        self, emissions: Sequence[Emission], last: Ended | Exception | None, progress: PromptRead | None = None
    ) -> None:
        """What a round gave; `last`: how it ended, if it did."""
        if self._over:
            return
        if progress is not None:
            self._items.append(progress)
        if emissions:
            self._backlog += len(emissions)
            waiting = self._items[-1] if self._items else None
            if isinstance(waiting, list):  # the reader is late: it gets the rounds together, which is less work for it
                waiting += emissions
            else:
                self._items.append(list(emissions))
        if last is not None:
            if isinstance(last, Ended):
                self._items.append(last)
            else:
                self._failure = last
            self._end(abandoned=False)
        elif self._backlog > MANY and not self._held:
            self._held = True
            self._keeper.hold(self, True)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Stop it; its reader gets the error after what came before."""
        if not self._over:
            self._failure = error
            self._end(abandoned=True)
            self._wake()

    async def close(self) -> None:
        """Stop it and free its memory. Safe at any time and any number of times; it never waits."""
        self._closed = True
        self._items.clear()
        if not self._over:
            self._end(abandoned=True)
        self._wake()

    def _end(self, abandoned: bool) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._keeper.over(self, abandoned)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[PromptRead | Sequence[Emission] | Ended]:
        return self

    async def __anext__(self) -> PromptRead | Sequence[Emission] | Ended:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                self._closed = True
                raise self._failure
            if self._over:
                raise StopAsyncIteration
            assert self._waiter is None, "one reader at a time"
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if isinstance(item, list):
            self._backlog -= len(item)
            if self._held and self._backlog <= FEW:
                self._held = False
                self._keeper.hold(self, False)
        return item
