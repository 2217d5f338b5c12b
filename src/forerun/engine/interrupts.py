"""Ctrl-C waits for the end of what must not be left half done; a second one does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Hold:
    """A handler that notes the first Ctrl-C and lets the second one through."""

    pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        self.pressed = True


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A KeyboardInterrupt comes after the block. Where somebody else handles the signal, nothing is done here."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    hold = Hold()
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    except Exception as error:
        if hold.pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hold.pressed:
        raise KeyboardInterrupt


@contextmanager
def interrupts_let_through() -> Iterator[None]:
    """Within a held block: work that takes long and has no consequence if it is given up."""
    hold = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not isinstance(hold, Hold):
        yield
        return
    if hold.pressed:
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, hold)
