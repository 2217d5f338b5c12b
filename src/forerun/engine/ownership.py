"""One thread at a time is inside an engine. Everybody else waits outside or leaves a command."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch

from forerun.openmp import one_worker

log = logging.getLogger("forerun")


class Ownership:
    """Use it as a `with` block around whatever touches an engine; blocks may be nested.

    `post` may be called anywhere, from a finaliser that runs in the middle of a step too: the command is carried out
    when somebody next comes in from outside.
    """

    def __init__(
        self,
        device: torch.device,
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        """`recover`: called before the first thread comes in after an interruption."""
        self._device, self._recover = device, recover
        self._interrupted = False
        self._lock = threading.RLock()
        self._depth = 0
        self._inside = ExitStack()  # what the owner's thread needs around its work
        self._commands: deque[Callable[[], None]] = deque()

    def post(self, command: Callable[[], None]) -> None:
        """Leave a command; it never waits."""
        self._commands.append(command)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            try:
                self._inside.enter_context(torch.inference_mode())
                self._inside.enter_context(one_worker())
                if self._device.type == "cuda":  # kernels are launched on the current device
                    self._inside.enter_context(torch.cuda.device(self._device))
                if self._interrupted:
                    self._recover()
                    self._interrupted = False
                self._obey()
            except BaseException:
                self.__exit__(None, None, None)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._interrupted |= error is not None and not isinstance(error, Exception)
        try:
            if self._depth == 0:
                self._inside.close()
        finally:
            self._lock.release()

    def _obey(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                log.exception("a command that was left for the engine failed")
