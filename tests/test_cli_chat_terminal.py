"""`forerun chat` on a tiny model behind a real pseudo-terminal: typing, Ctrl-C, Ctrl-D, and through a pipe."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_model

from forerun.cli.chat_talkers import LocalReply
from forerun.cli.main import main
from forerun.response import Chunk
from forerun.serve.parsing.formats import AnswerFormat
from forerun.serve.parsing.make import make_parser

# Tests that a shell runs in the background inherit a Ctrl-C that is ignored; a terminal's own program does not.
PROGRAM = """
import signal; signal.signal(signal.SIGINT, signal.default_int_handler)
from forerun.cli.main import run; run()
"""
PATIENCE = 60.0  # seconds; a busy machine takes long to import torch


class Terminal:
    """A program behind a pseudo-terminal that is its controlling one, so that keys become signals."""

    def __init__(self, *arguments: str) -> None:
        self.master, self.slave = pty.openpty()  # both stay open: else all is over until the program opens its end
        name = os.ttyname(self.slave)
        # A session leader that opens a terminal gets it as its own.
        shell = 'exec "$@" <"$0" >"$0" 2>&1'
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
        command = ["sh", "-c", shell, name, sys.executable, "-c", PROGRAM, *arguments]
        self.process = subprocess.Popen(command, start_new_session=True, env=environment)
        self.seen = ""

    def expect(self, text: str) -> str:
        """Wait until it appears; what came up to there is taken away and returned."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            self._read(deadline, text)
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait_for_text(self) -> None:
        """Wait until anything that can be seen is there."""
        deadline = time.monotonic() + PATIENCE
        while not self.seen.strip():
            self._read(deadline, "text")

    def _read(self, deadline: float, wanted: str) -> None:
        assert time.monotonic() < deadline, f"no {wanted!r} in {self.seen!r}"
        if select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        else:
            assert self.process.poll() is None, f"it ended without {wanted!r}: {self.seen!r}"

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=100_000)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    # Nothing ends its answers but us: the end tokens are forbidden.
    opened = Terminal("chat", str(folder), "--suppress", "0,2", "--max-context", "50000", "--plain")
    yield opened
    opened.close()


def test_typing_stopping_and_leaving(terminal: Terminal) -> None:
    terminal.expect("/help for commands")
    terminal.expect("> ")
    terminal.type("/set max_tokens=5\n")
    terminal.expect("max_tokens=5")
    terminal.type("hello\n")
    terminal.expect("5 tokens · ")
    terminal.type("/set max_tokens=default\n")
    terminal.expect("max_tokens=None")
    terminal.expect("> ")
    terminal.type("and now for ever\n")
    terminal.expect("\n")  # the echo of what was typed
    terminal.wait_for_text()
    terminal.type("\x03")
    terminal.expect("stopped · ")
    terminal.expect("> ")
    terminal.type("/stats\n")
    terminal.expect("2 answers")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_through_a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/nope\n"))
    assert main(["chat", str(folder), "-n", "6", "--max-context", "100"]) == 2, "a command went wrong"
    out, err = capsys.readouterr()
    assert out.strip() and "> " not in out and "6 tokens" in err and "there is no command /nope" in err
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert main(["chat", "-m", str(folder), "-n", "6", "--max-context", "100", "--quiet"]) == 0
    again = capsys.readouterr()
    assert again.out == out and again.err == ""


def test_contradictions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line, said in {
        "chat a -m b": "two models",
        "chat --raw": "needs one",
        "chat --head a --draft-model b": "two drafters",
        "chat --head=": "--head is empty",
        "chat --temp -1": "temperature",
    }.items():
        assert main(line.split()) == 2
        assert said in capsys.readouterr().err


class FakeGeneration:
    """Chunks of an answer that thinks first."""

    def __init__(self, *texts: str) -> None:
        self._chunks = iter([Chunk(text, 1, arm="mtp") for text in texts])

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __iter__(self) -> FakeGeneration:
        return self


def test_thoughts_of_a_local_model_are_told_apart() -> None:
    for opened, texts in ((False, ["<thi", "nk>h", "m</think>", "Yes", "."]), (True, ["h", "m</thi", "nk>Yes."])):
        parser = make_parser(AnswerFormat(reasoning="think"), (), thinking_open=opened)
        pieces = list(LocalReply(FakeGeneration(*texts), parser))  # type: ignore[arg-type]
        assert "".join(piece.text for piece in pieces if piece.thought).strip() == "hm"
        assert "".join(piece.text for piece in pieces if not piece.thought).strip() == "Yes."
        assert {piece.arm for piece in pieces} == {"mtp"}
