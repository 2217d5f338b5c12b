"""Progress on everything long. Library code reports through this protocol and never prints."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Task(Protocol):
    """One running piece of work; leave the `with` block to end it."""

    def advance(self, amount: int = 1) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Progress(Protocol):
    """Where progress goes: a terminal, a server's log, or nowhere."""

    def task(self, name: str, total: int | None = None) -> Task: ...


class NullTask:
    """A task nobody watches."""

    def advance(self, amount: int = 1) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class NullProgress:
    """The default: quiet."""

    def task(self, name: str, total: int | None = None) -> NullTask:  # noqa: ARG002
        return NullTask()
