"""Progress is drawn on a terminal, and only there."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from forerun.cli.terminal_progress import RichProgress, terminal_progress
from forerun.progress import NullProgress


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_need_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(terminal_progress(quiet=False), NullProgress)
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(terminal_progress(quiet=False), RichProgress)
    assert isinstance(terminal_progress(quiet=True), NullProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(terminal_progress(quiet=False), NullProgress)


def test_a_bar_shows_how_far_and_gives_the_cursor_back() -> None:
    screen = io.StringIO()
    progress = RichProgress(Console(file=screen, force_terminal=True, width=100))
    with progress.task("loading weights", 4) as outer:
        outer.advance(1)
        with progress.task("converting") as inner:
            inner.advance()
        outer.advance(2)
        progress._bars.refresh()
    shown = screen.getvalue()
    assert "loading weights" in shown and "75%" in shown and "converting" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor stays hidden"


def test_a_failure_inside_takes_the_bar_away() -> None:
    screen = io.StringIO()
    progress = RichProgress(Console(file=screen, force_terminal=True, width=100))
    with pytest.raises(KeyboardInterrupt), progress.task("prefill", 10):
        raise KeyboardInterrupt
    assert not progress._bars.live.is_started
    with progress.task("again", 1) as task:  # and the display can be used once more
        task.advance()
    assert "again" in screen.getvalue()
