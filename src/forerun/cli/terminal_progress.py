"""Progress bars on stderr, and only where somebody watches: nothing is drawn into a file or a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from forerun.progress import NullProgress, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


def terminal_progress(quiet: bool) -> Progress:
    """Bars when stderr is a terminal and the user has not asked for silence."""
    if quiet or not sys.stderr.isatty():
        return NullProgress()
    from rich.console import Console

    console = Console(stderr=True)
    return NullProgress() if console.is_dumb_terminal else RichProgress(console)


class RichProgress:
    """One bar per running task, gone when the task ends. The display lives only while a task does."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bars = Bars(*columns, TimeElapsedColumn(), console=console, transient=True)

    def task(self, name: str, total: int | None = None) -> RichTask:
        return RichTask(self._bars, name, total)


class RichTask:
    """A bar that is there while its `with` block runs: the first one starts the display, the last one ends it."""

    def __init__(self, bars: Bars, name: str, total: int | None) -> None:
        self._bars, self._name, self._total = bars, name, total
        self._id: TaskID | None = None

    def advance(self, amount: int = 1) -> None:
        if self._id is not None:
            self._bars.advance(self._id, amount)

    def __enter__(self) -> Self:
        if not self._bars.tasks:
            self._bars.start()
        self._id = self._bars.add_task(self._name, total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._id is not None:
            self._bars.remove_task(self._id)
            self._id = None
        if not self._bars.tasks:
            self._bars.stop()  # and gives the cursor back
