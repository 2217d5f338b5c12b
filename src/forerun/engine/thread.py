"""An engine on a thread of its own, as a server wants it: others leave commands, the thread runs rounds."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from forerun.engine.engine import Engine
from forerun.engine.sequence import Status
from forerun.errors import ForerunError

log = logging.getLogger("forerun")
FAILURES = 3  # rounds in a row that fail as a whole: then it is the engine, and not what it was asked for
Result = TypeVar("Result")
Command = tuple["Future[Any] | None", Callable[[], Any]]


class EngineThread:
    """`call` and `post` hand commands over, `delivered` is called on the thread after every round; `close` ends it."""

    def __init__(
        self,
        engine: Engine,
        delivered: Callable[[], None],
        capacity: int = 1024,
        died: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """`capacity`: calls that may wait; more are refused rather than kept. `died`: the thread ended by an error."""
        self._engine, self._delivered, self._died, self._capacity = engine, delivered, died, capacity
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._door, self._closed = threading.Lock(), False
        self._failures = 0  # rounds in a row that failed as a whole
        self._thread = threading.Thread(target=self._run, name="forerun engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Have something done between two rounds, and get what it gives."""
        future: Future[Result] = Future()
        with self._door:
            if self._closed:
                raise ForerunError("the engine has been closed")
            if self._inbox.qsize() >= self._capacity:
                raise ForerunError("too many requests are waiting: try again later")
            self._inbox.put((future, command))
        return future

    def post(self, command: Callable[[], Any]) -> bool:
        """Leave something to be done between two rounds. It is never refused, unless the end has come: then False.

        Whoever posts sees to it that there are never many: what frees memory must get through where `call` would not.
        """
        with self._door:
            if not self._closed:
                self._inbox.put((None, command))
            return not self._closed

    @property
    def closed(self) -> bool:
        """Will nothing more be done?"""
        return self._closed

    def close(self, timeout: float | None = None) -> bool:
        """Do what was asked for until now, then stop. Sequences stay as they are after the last round. Returns whether
        the thread has ended by now.
        """
        with self._door:
            self._closed = True
            self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._obey(wait=self._engine.scheduler.idle):
                if not self._engine.scheduler.idle:
                    self._step()
                    self._delivered()
            self._engine.settle()
        except BaseException as error:
            log.exception("the engine's thread has ended")
            self._refuse(error)
            self._died(error)

    def _step(self) -> None:
        """One round. What an engine raises is nobody's in particular: all who were in it fail, and others may come."""
        try:
            self._engine.step()
        except Exception as error:
            self._failures += 1
            if self._failures >= FAILURES:
                raise
            log.exception("a round failed as a whole")
            with self._engine.owner:
                for sequence in self._engine.scheduler.active:
                    if sequence.status in (Status.RUNNING, Status.PREFILL):
                        sequence.fail(error)
        else:
            self._failures = 0

    def _refuse(self, error: BaseException) -> None:
        """Nobody will carry out what is left."""
        with self._door:
            self._closed = True
        while not self._inbox.empty():
            entry = self._inbox.get()
            if entry is not None and entry[0] is not None and entry[0].set_running_or_notify_cancel():
                entry[0].set_exception(error)

    def _obey(self, wait: bool) -> bool:
        """Carry out all commands that are there; with `wait` at least one. False: it is the end."""
        while True:
            try:
                entry = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if entry is None:
                return False
            wait = False
            self._carry_out(*entry)

    def _carry_out(self, future: Future[Any] | None, command: Callable[[], Any]) -> None:
        if future is None:
            try:
                command()
            except Exception:
                log.exception("a command that was left for the engine failed")
        elif future.set_running_or_notify_cancel():
            try:
                future.set_result(command())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                future.set_exception(error)
