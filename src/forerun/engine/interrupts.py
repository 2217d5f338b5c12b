"""Ctrl-C waits for the end of what must not be left half done; a second one does not wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Hold:
    """A handler that notes the first Ctrl-C and lets the second one through."""

    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        self.pressed = True


# Both are classes and not generators: a generator that an interrupt keeps from being left is closed when it is
# collected, and would put its handler back long after the block.


class interrupts_held:
    """A KeyboardInterrupt comes after the block. Where somebody else handles the signal, nothing is done here."""

    _hold: Hold | None = None

    def __enter__(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._hold = Hold()
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hold is None:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._hold.pressed and (error is None or isinstance(error, Exception)):
            raise KeyboardInterrupt from error


class interrupts_let_through:
    """Within a held block: work that takes long and has no consequence if it is given up."""

    _hold: Hold | None = None

    def __enter__(self) -> None:
        hold = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        if not isinstance(hold, Hold):
            return
        if hold.pressed:
            raise KeyboardInterrupt
        self._hold = hold
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hold is not None:
            signal.signal(signal.SIGINT, self._hold)
