"""A few threads for work beside the event loop, that the end of the process does not wait for.

Those of `concurrent.futures` are joined when Python ends, so that a film which takes long to decode would hold up a
server that was told to end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from forerun.openmp import release_workers

Given = ParamSpec("Given")
Made = TypeVar("Made")
Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """They begin with the first work and end with `shutdown`."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()  # None: end
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False

    def submit(self, work: Callable[Given, Made], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Made]:
        """Queue it. RuntimeError when they have ended."""
        future: Future[Made] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads have ended")
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._tasks.put((future, partial(copy_context().run, work, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing new; the threads end when they have done what was queued, or at once with `cancel_futures`."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                with suppress(Empty):
                    while (task := self._tasks.get_nowait()) is not None:
                        task[0].cancel()
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def join(self, seconds: float) -> None:
        """Wait for threads that were told to end, but not for longer."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                    future.set_exception(error)
            del task, future, work  # nothing is held while nothing is done
            release_workers()


async def beside(work: Callable[[], Made]) -> Made:
    """What takes long, on a thread of its own."""
    thread = DaemonThreads(1, "forerun beside")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
