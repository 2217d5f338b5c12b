"""An engine on a thread of its own, as a server wants it: others leave commands, the thread runs rounds."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from forerun.engine.engine import Engine
from forerun.errors import ForerunError

log = logging.getLogger("forerun")
Result = TypeVar("Result")
Command = tuple["Future[Any]", Callable[[], Any]]


class EngineThread:
    """`call` hands a command over, `delivered` is called on the thread after every round; `close` ends it."""

    def __init__(self, engine: Engine, delivered: Callable[[], None], capacity: int = 1024) -> None:
        """`capacity`: commands that may wait; more are refused rather than kept."""
        self._engine, self._delivered = engine, delivered
        self._inbox: queue.Queue[Command | None] = queue.Queue(capacity)
        self._door, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="forerun engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Result]) -> Future[Result]:
        """Have something done between two rounds: a submit, a cancel, a release."""
        future: Future[Result] = Future()
        with self._door:
            if self._closed:
                raise ForerunError("the engine has been closed")
            try:
                self._inbox.put_nowait((future, command))
            except queue.Full:
                raise ForerunError("too many requests are waiting: try again later") from None
        return future

    def close(self) -> None:
        """Do what was asked for until now, then stop. Sequences stay as they are after the last round."""
        with self._door:
            self._closed = True
        if self._thread.is_alive():
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey(wait=self._engine.scheduler.idle):
                if not self._engine.scheduler.idle:
                    self._engine.step()
                    self._delivered()
            self._engine.settle()
        except BaseException as error:
            log.exception("the engine's thread has ended")
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Nobody will carry out what is left."""
        with self._door:
            self._closed = True
        while not self._inbox.empty():
            entry = self._inbox.get()
            if entry is not None and entry[0].set_running_or_notify_cancel():
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
            future, command = entry
            wait = False
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked
                    future.set_exception(error)
