"""A server whose own engine can be asked without it: both ways on the same weights at the same place in memory.

Two processes that do the same work differ by several per cent for as long as they live.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import forerun
from forerun.bench.child_server import ChildServer
from forerun.bench.engine_load import EngineTarget
from forerun.bench.load import ClosedLoop, Job, first_error
from forerun.errors import ForerunError
from forerun.language_model import LanguageModel

PROGRAM = "import sys; from forerun.bench.compared_server import serve; serve(sys.argv[1], int(sys.argv[2]))"


class ComparedServer(ChildServer):
    """`engine_turn` runs requests straight through its engine, while nobody asks the server for anything."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._command = [sys.executable, "-c", PROGRAM, model, str(self.address.port)]
        self._pipes = subprocess.PIPE

    def engine_turn(self, jobs: Sequence[Job], clients: int, arm: str) -> tuple[float, list[str]]:
        """See `run_engine`."""
        into, out = self._process.stdin, self._process.stdout
        assert into is not None and out is not None
        into.write(json.dumps([[asdict(job) for job in jobs], clients, arm]).encode() + b"\n")
        into.flush()
        rate, texts, refused = json.loads(out.readline() or '[0, [], "the server ended"]')
        if refused is not None:
            raise ForerunError(refused)
        return rate, texts


def serve(model: str, port: int) -> None:
    """In the child: `forerun serve`, and turns for the engine alone from stdin."""
    from forerun.serve.run import run_server
    from forerun.serve.settings import ServeSettings

    loaded: list[LanguageModel] = []

    def load() -> LanguageModel:
        loaded.append(forerun.load(model, prefix_cache=False))
        return loaded[0]

    def take_turns() -> None:
        target: EngineTarget | None = None
        for line in sys.stdin:
            jobs, clients, arm = json.loads(line)
            answer: tuple[float, list[str], str | None]
            try:
                target = target or EngineTarget(loaded[0])
                answer = (*run_engine(target, [Job(**job) for job in jobs], clients, arm), None)
            except ForerunError as error:
                answer = (0.0, [], str(error))
            print(json.dumps(answer), flush=True)

    threading.Thread(target=take_turns, daemon=True).start()
    run_server(load, ServeSettings(port=port), model)


def run_engine(target: EngineTarget, jobs: Sequence[Job], clients: int, arm: str) -> tuple[float, list[str]]:
    """One turn of the closed loop without a server: tokens per second, and the texts in the order of the jobs."""
    target.prepare(jobs)
    try:
        run = asyncio.run(ClosedLoop(clients).run(jobs, partial(target.answer, arm=arm)))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return run.tokens_per_second, [answer.text for answer in run.answers]
