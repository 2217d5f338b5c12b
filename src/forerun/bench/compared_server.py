"""A server whose own engine can be asked without it: both ways on the same weights at the same place in memory.

Two processes that do the same work differ by several per cent for as long as they live.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

import forerun
from forerun.bench.child_server import ChildServer
from forerun.bench.http_load import Job
from forerun.engine.sequence import Status
from forerun.errors import ForerunError
from forerun.language_model import Generation, LanguageModel

PROGRAM = "import sys; from forerun.bench.compared_server import serve; serve(sys.argv[1], int(sys.argv[2]))"


class ComparedServer(ChildServer):
    """`engine_turn` runs requests straight through its engine, while nobody asks the server for anything."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._command = [sys.executable, "-c", PROGRAM, model, str(self.address.port)]
        self._pipes = subprocess.PIPE

    def engine_turn(self, jobs: Sequence[Job], clients: int, arm: str) -> tuple[float, dict[str, str]]:
        """See `run_engine`."""
        into, out = self._process.stdin, self._process.stdout
        assert into is not None and out is not None
        into.write(json.dumps([[asdict(job) for job in jobs], clients, arm]).encode() + b"\n")
        into.flush()
        rate, texts, refused = json.loads(out.readline() or '[0, {}, "the server ended"]')
        if refused is not None:
            raise ForerunError(refused)
        return rate, texts


def serve(model: str, port: int) -> None:
    """In the child: `forerun serve`, and turns for the engine alone from stdin."""
    from forerun.serve.run import run_server
    from forerun.serve.settings import ServeSettings

    loaded: list[LanguageModel] = []

    def load() -> LanguageModel:
        loaded.append(forerun.load(model))
        return loaded[0]

    def take_turns() -> None:
        for line in sys.stdin:
            jobs, clients, arm = json.loads(line)
            answer: tuple[float, dict[str, str], str | None]
            try:
                answer = (*run_engine(loaded[0], [Job(**job) for job in jobs], clients, arm), None)
            except ForerunError as error:
                answer = (0.0, {}, str(error))
            print(json.dumps(answer), flush=True)

    threading.Thread(target=take_turns, daemon=True).start()
    run_server(load, ServeSettings(port=port), model)


def run_engine(model: LanguageModel, jobs: Sequence[Job], clients: int, arm: str) -> tuple[float, dict[str, str]]:
    """One turn of the closed loop without a server: tokens per second, and the texts."""
    waiting, tokens, texts = list(reversed(jobs)), 0, dict[str, str]()
    running: list[tuple[str, Generation]] = []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < clients:
            job = waiting.pop()
            running.append((job.id, start(model, job, arm)))
        with model.engine.owner:
            model.engine.step()
        for name, generation in [entry for entry in running if entry[1].sequence.status is Status.FINISHED]:
            running.remove((name, generation))
            with generation:
                texts[name] = "".join(chunk.text for chunk in generation)
                tokens += len(generation.sequence.answer)
    return tokens / (time.perf_counter() - began), texts


def start(model: LanguageModel, job: Job, arm: str) -> Generation:
    """A request as the server would make it."""
    return model.start(job.messages, max_tokens=job.max_tokens, temperature=job.temperature, seed=job.seed, draft=arm)
