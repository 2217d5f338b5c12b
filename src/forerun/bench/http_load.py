"""`forerun bench --url`: how fast a server is with 1, 4, 16 clients, drafting and not, and whether the texts are equal.

A closed loop: every client asks for the next answer when it has one. The arms take turns on the same requests, so that
a ratio is between neighbours in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from forerun.bench.http_client import Address
from forerun.bench.statistics import Interval, median
from forerun.bench.workloads import Workload, load_workloads
from forerun.errors import ForerunError
from forerun.progress import Progress

ARMS = ("off", "auto")
TURNS = 3
LEAST_JOBS, JOBS_PER_CLIENT = 20, 3  # a turn is long enough that its end, when clients run dry, does not count much
PERCENTILES = (50, 90, 99)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Job:
    """One request, but for the arm."""

    id: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int

    def body(self, arm: str) -> dict[str, Any]:
        """As a server takes it."""
        return {
            "messages": self.messages,
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "speculative": arm,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What came, and when: seconds to the first text, between the pieces after it, and in all."""

    text: str
    tokens: int
    first: float
    gaps: list[float]
    seconds: float


@dataclass(slots=True)
class LoadCell:
    """One arm with so many clients: one entry of `rates` per turn, and all answers of all turns."""

    clients: int
    arm: str
    temperature: float
    rates: list[float] = field(default_factory=list)  # tokens per second of all clients together
    answers: list[tuple[str, Answer]] = field(default_factory=list)  # with the job's id
    equal: int = 0
    ratios: list[float] = field(default_factory=list)  # over plain decoding, turn by turn

    def add(self, answers: list[tuple[str, Answer]], seconds: float) -> None:
        """A turn."""
        self.rates.append(sum(answer.tokens for _, answer in answers) / seconds)
        self.answers += answers

    @property
    def total(self) -> int:
        return len(self.answers)

    @property
    def tokens_per_second(self) -> float:
        return median(self.rates).value

    @property
    def ratio(self) -> Interval | None:
        """Over plain decoding; None where a text differs."""
        return median(self.ratios) if self.ratios and self.equal == self.total else None

    @property
    def first(self) -> list[float]:
        """Percentiles of the seconds to the first text."""
        return _percentiles([answer.first for _, answer in self.answers])

    @property
    def gaps(self) -> list[float]:
        """Percentiles of the seconds between two pieces of text."""
        return _percentiles([gap for _, answer in self.answers for gap in answer.gaps])

    @property
    def per_token(self) -> list[float]:
        """Percentiles of the seconds per token after the first, answer by answer."""
        each = [sum(answer.gaps) / (answer.tokens - 1) for _, answer in self.answers if answer.tokens > 1]
        return _percentiles(each)


def parse_clients(text: str) -> list[int]:
    """`1,4,16` → `[1, 4, 16]`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise ForerunError(f"--clients {text}: give numbers from 1 to 1024 with commas, for example 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


def make_jobs(workloads: Sequence[Workload], temperature: float, clients: int, full: bool) -> list[Job]:
    """Requests of all kinds, mixed: the first of each kind, then the second of each."""
    wanted = max(LEAST_JOBS, JOBS_PER_CLIENT * clients)
    samples = workloads if full else [workload.sample(-(-wanted // len(workloads))) for workload in workloads]
    jobs = [
        (number, Job(prompt.id, prompt.messages, workload.answer_tokens, temperature, number))
        for workload in samples
        for number, prompt in enumerate(workload.prompts)
    ]
    return [job for _, job in sorted(jobs, key=lambda pair: pair[0])]


async def ask(server: Address, job: Job, arm: str) -> Answer:
    """One answer, timed at this end."""
    began = last = time.perf_counter()
    text, times, tokens = [], list[float](), 0
    for now, event in await server.stream(CHAT, job.body(arm)) or ():
        for choice in event["choices"]:
            piece = choice["delta"].get("reasoning_content") or choice["delta"].get("content")
            if piece:
                times.append(now - last)
                last = now
                text.append(piece)
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    ended = time.perf_counter() - began
    return Answer("".join(text), tokens, times[0] if times else ended, times[1:], ended)


async def closed_loop(
    jobs: Sequence[Job], clients: int, answer: Callable[[Job], Awaitable[Answer]]
) -> tuple[list[tuple[str, Answer]], float]:
    """All answers, and the seconds until the last one had come."""
    waiting, answers = list(reversed(jobs)), list[tuple[str, Answer]]()

    async def client() -> None:
        while waiting:
            job = waiting.pop()
            answers.append((job.id, await answer(job)))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(jobs))):
            group.create_task(client())
    return answers, time.perf_counter() - began


async def measure_load(
    server: Address,
    *,
    clients: Sequence[int],
    workloads: Sequence[str],
    temperatures: Sequence[float],
    full: bool,
    progress: Progress,
) -> list[LoadCell]:
    """All cells. Both arms once unmeasured: what runs first pays for cold caches."""
    chosen = load_workloads(workloads)
    for arm in ARMS:
        await ask(server, make_jobs(chosen, 0.0, 1, full)[0], arm)
    cells: list[LoadCell] = []
    plans = [(temperature, count) for temperature in temperatures for count in clients]
    with progress.task("measuring", len(plans) * TURNS * len(ARMS)) as task:
        for temperature, count in plans:
            jobs = make_jobs(chosen, temperature, count, full)
            row = {arm: LoadCell(count, arm, temperature) for arm in ARMS}
            for turn in range(TURNS):
                for arm in ARMS if turn % 2 == 0 else reversed(ARMS):
                    answers, seconds = await closed_loop(jobs, count, partial(ask, server, arm=arm))
                    row[arm].add(answers, seconds)
                    task.advance()
            compare(row)
            cells += row.values()
    return cells


def compare(row: dict[str, LoadCell]) -> None:
    """Texts with those of plain decoding, rates turn by turn."""
    plain = dict(row["off"].answers)
    for cell in row.values():
        cell.equal = sum(answer.text == plain[name].text for name, answer in cell.answers)
        if cell.arm != "off":
            cell.ratios = [ours / theirs for ours, theirs in zip(cell.rates, row["off"].rates, strict=True)]


def to_data(cells: Sequence[LoadCell]) -> list[dict[str, Any]]:
    """One entry per cell; seconds; `ratio` is null where texts differ."""
    return [
        {
            "clients": cell.clients,
            "arm": cell.arm,
            "temperature": cell.temperature,
            "tokens_per_second": cell.tokens_per_second,
            "ratio": None if cell.ratio is None else cell.ratio.value,
            "first_token_seconds": _named(cell.first),
            "inter_token_seconds": _named(cell.gaps),
            "seconds_per_token": _named(cell.per_token),
            "equal": cell.equal,
            "total": cell.total,
        }
        for cell in cells
    ]


def _named(percentiles: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": value for share, value in zip(PERCENTILES, percentiles, strict=True)}


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, PERCENTILES)] if values else [0.0] * len(PERCENTILES)
