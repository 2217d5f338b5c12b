"""A `forerun serve` in a process of its own, for suites that measure it or press it hard."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from forerun.bench.http_client import Address
from forerun.errors import ForerunError

PROGRAM = "from forerun.cli.main import run; run()"
PATIENCE = 300.0  # seconds to load a model
GOODBYE = 60.0  # seconds to end


class ChildServer:
    """Serves while its `with` block runs."""

    def __init__(self, model: str, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = Address("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-c", PROGRAM, "serve", model, "--port", str(port), "--quiet"]
        self._command += ["--log-level", "warning", *flags]
        self._pipes: int | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=self._pipes, stdout=self._pipes)
        try:
            asyncio.run(self._ready())
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ForerunError(f"the server ended with code {self._process.returncode} before it was ready")
            try:
                await self.address.fetch("/health")
                return
            except ForerunError:  # not listening yet, or loading
                await asyncio.sleep(0.1)
        raise ForerunError(f"the server was not ready after {PATIENCE:.0f} seconds")

    def loop_seconds(self) -> float:
        """CPU time of its event loop, which is its first thread, as Linux tells it: all of serving but the engine."""
        process = self._process.pid
        return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9

    def memory(self) -> int:
        """Bytes of physical memory it holds, as Linux tells it."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
