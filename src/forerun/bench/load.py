"""`forerun bench --load`: an engine, or a server, with several clients at once, every arm beside plain decoding.

Two kinds of load. In a closed loop each of N clients asks for its next answer when it has one. In an open loop requests
come at random (Poisson), whatever is under way. The arms take turns on the same requests, so that a ratio is between
neighbours in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from forerun.bench.workloads import Workload, WorkloadPrompt
from forerun.errors import ForerunError
from forerun.progress import Progress

OFF = "off"  # plain decoding
CLIENTS, CLIENTS_ON_CPU = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)
MOST_CLIENTS = 1024
SHARES = (0.5, 0.8, 1.0)  # of what the closed loop with most clients did
MINUTES = 15.0
TURNS = 3
LEAST_JOBS, JOBS_PER_CLIENT = 20, 3  # a turn is long enough that its end, when clients run dry, does not count much
LEAST_ARRIVALS = 10  # of an open loop: fewer say nothing about waiting
FILLED = 0.9  # of the time there is, when the number of prompts is chosen: some answers take longer than the first ones


@dataclass(frozen=True, slots=True)
class Job:
    """One request, but for the arm. `id` names its prompt."""

    id: str
    content: str | list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a server takes it."""
        return WorkloadPrompt(self.id, self.content).messages


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """What came, and when: seconds from the request to the first token, and between arrivals after it.

    Tokens that come at once, out of one round or in one packet, are one arrival.
    """

    text: str
    tokens: int
    first: float
    gaps: list[float]
    prompt_rows: int  # tokens of the prompt that were read
    other_rows: int  # rows of passes after it: the pending tokens and their drafts


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All answers in the order of their jobs, and the seconds until the last one had come."""

    answers: list[TimedAnswer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def answers_per_second(self) -> float:
        return len(self.answers) / self.seconds


class LoadTarget(Protocol):
    """What is measured."""

    @property
    def arms(self) -> Sequence[str]:
        """Plain decoding first."""
        ...

    @property
    def on_cpu(self) -> bool:
        """As far as is known."""
        ...

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Do what need not be timed, and refuse what can never be answered."""
        ...

    async def answer(self, job: Job, since: float, arm: str) -> TimedAnswer:
        """One answer; `since` is when the client asked for it, by `time.perf_counter`."""
        ...


Answering = Callable[[Job, float], Awaitable[TimedAnswer]]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each with one request at a time."""

    clients: int

    async def run(self, jobs: Sequence[Job], answer: Answering) -> LoadRun:
        """Clients take the next job that no client has taken."""
        answers: dict[int, TimedAnswer] = {}
        waiting: Iterator[tuple[int, Job]] = iter(enumerate(jobs))

        async def client() -> None:
            for index, job in waiting:
                answers[index] = await answer(job, time.perf_counter())

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.clients, len(jobs))):
                group.create_task(client())
        return LoadRun([answers[index] for index in range(len(jobs))], time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """So many requests per second on average, whatever became of those before."""

    rate: float

    async def run(self, jobs: Sequence[Job], answer: Answering) -> LoadRun:
        """The same moments whenever the same jobs come. An answer's time counts from the moment it should have been
        asked for: an engine that is busy in a round hears of it later.
        """
        gaps = np.random.default_rng(jobs[0].seed).exponential(1 / self.rate, len(jobs))
        began = time.perf_counter()

        async def client(job: Job, due: float) -> TimedAnswer:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            return await answer(job, due)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(client(job, began + moment))
                for job, moment in zip(jobs, gaps.cumsum().tolist(), strict=True)
            ]
        return LoadRun([task.result() for task in tasks], time.perf_counter() - began)


Load = ClosedLoop | OpenLoop


@dataclass(slots=True)
class LoadCell:
    """One arm under one load: an entry of `speeds` and `ratios` per turn, and the times of all answers."""

    load: Load
    arm: str
    temperature: float
    speeds: list[float] = field(default_factory=list)  # tokens per second of all clients together
    answer_speeds: list[float] = field(default_factory=list)  # answers per second
    ratios: list[float] = field(default_factory=list)  # over plain decoding in the same turn
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_rows: int = 0
    other_rows: int = 0
    equal: int = 0
    total: int = 0

    def add(self, run: LoadRun, plain: LoadRun) -> None:
        """A turn, beside plain decoding of the same jobs in it."""
        self.speeds.append(run.tokens_per_second)
        self.answer_speeds.append(run.answers_per_second)
        if plain.tokens_per_second:
            self.ratios.append(run.tokens_per_second / plain.tokens_per_second)
        for answer, other in zip(run.answers, plain.answers, strict=True):
            self.firsts.append(answer.first)
            self.gaps += answer.gaps
            self.prompt_rows += answer.prompt_rows
            self.other_rows += answer.other_rows
            self.equal += answer.text == other.text
            self.total += 1

    @property
    def tokens_per_second(self) -> float:
        return float(np.median(self.speeds))

    @property
    def answers_per_second(self) -> float:
        return float(np.median(self.answer_speeds))

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Over plain decoding: the median of the turns, the lowest and the highest. None where a text differs."""
        if self.equal < self.total or not self.ratios:
            return None
        return float(np.median(self.ratios)), min(self.ratios), max(self.ratios)

    @property
    def prompt_share(self) -> float | None:
        """Rows of prompts among all rows of the target's passes."""
        rows = self.prompt_rows + self.other_rows
        return self.prompt_rows / rows if rows else None

    def first(self, percent: float) -> float | None:
        """Percentile of the seconds to the first token."""
        return _percentile(self.firsts, percent)

    def between(self, percent: float) -> float | None:
        """Percentile of the seconds between arrivals."""
        return _percentile(self.gaps, percent)


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """Clients fail together when what they ask goes: one of their errors is enough."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def numbers(flag: str, text: str, example: str) -> list[float]:
    """`1,4,16` → `[1.0, 4.0, 16.0]`, each once and above zero."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise ForerunError(f"{flag} {text}: give numbers above 0 with commas, for example {example}")
    return list(dict.fromkeys(found))


def parse_clients(text: str) -> list[int]:
    """`1,4,16` → `[1, 4, 16]`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_CLIENTS for part in parts):
        raise ForerunError(f"--clients {text}: give numbers from 1 to {MOST_CLIENTS} with commas, for example 1,4,16")
    return list(dict.fromkeys(map(int, parts)))


@dataclass(frozen=True, slots=True)
class Jobs:
    """Requests of all kinds, mixed: the first prompt of each kind, then the second of each, and round again."""

    workloads: Sequence[Workload]

    def everything(self) -> list[tuple[WorkloadPrompt, int]]:
        """All prompts, and how long their answers may be."""
        entries = [
            (number, prompt, workload.answer_tokens)
            for workload in self.workloads
            for number, prompt in enumerate(workload.prompts)
        ]
        return [(prompt, tokens) for _, prompt, tokens in sorted(entries, key=lambda entry: entry[0])]

    def take(self, count: int, temperature: float, start: int = 0) -> list[Job]:
        """`count` of them from number `start` on. A prompt that comes again has another seed."""
        entries = self.everything()
        jobs = []
        for number in range(start, start + count):
            prompt, tokens = entries[number % len(entries)]
            jobs.append(Job(prompt.id, prompt.content, tokens, temperature, number))
        return jobs


@dataclass(slots=True)
class LoadReport:
    """What was measured, and for how many loads there was no time."""

    cells: list[LoadCell]
    dropped: int


class LoadBench:
    """Measures every arm of a target under several loads, within a time.

    Each load has an equal share of the time that is left. One answer per client of each arm, not counted, warms up and
    tells how long answers take; from that follows how many prompts each arm gets in each of `TURNS` turns: three per
    client and 20 at least where time allows, one per client where it does not. Turns and loads for which no time is
    left are dropped, except the first.
    """

    def __init__(self, target: LoadTarget, workloads: Sequence[Workload], *, minutes: float, full: bool) -> None:
        """`full`: every prompt in every turn, where time allows."""
        self.target, self.jobs, self.full = target, Jobs(workloads), full
        self._seconds, self._end = 60 * minutes, 0.0

    async def measure(
        self, clients: Sequence[int], shares: Sequence[float], temperatures: Sequence[float], progress: Progress
    ) -> LoadReport:
        """All cells: for each temperature the closed loops, then open ones at `shares` of what plain decoding did with
        most clients.
        """
        report = LoadReport([], len(temperatures) * (len(clients) + len(shares)))
        self.target.prepare(self.jobs.take(len(self.jobs.everything()), 0.0))
        self._end = time.perf_counter() + self._seconds
        with progress.task("measuring", report.dropped) as task:
            for temperature in temperatures:
                most: LoadCell | None = None  # plain decoding with most clients
                pace = 0.0  # seconds per answer then, by the slowest arm
                steps: list[ClosedLoop | float] = [*map(ClosedLoop, clients), *shares]
                for step in steps:
                    now = time.perf_counter()
                    if report.cells and now >= self._end:
                        return report
                    ends = now + (self._end - now) / report.dropped
                    if isinstance(step, ClosedLoop):
                        took = await self._warm_up(step.clients, temperature)
                        wanted = self._wanted(step.clients, step.clients, took, ends)
                        row = await self._turns(step, temperature, wanted, ends)
                        if step.clients == max(clients):
                            most, pace = row[0], took
                    else:
                        assert most is not None
                        rate = step * most.answers_per_second
                        wanted = self._wanted(max(clients), LEAST_ARRIVALS, max(pace, 1 / rate), ends)
                        row = await self._turns(OpenLoop(rate), temperature, wanted, ends)
                    report.cells += row
                    report.dropped -= 1
                    task.advance()
        return report

    async def _warm_up(self, clients: int, temperature: float) -> float:
        """Every arm once, which also pays for cold caches. Seconds per answer of the slowest."""
        jobs = self.jobs.take(clients, temperature)
        runs = [await ClosedLoop(clients).run(jobs, partial(self.target.answer, arm=arm)) for arm in self.target.arms]
        return max(run.seconds for run in runs) / clients

    def _wanted(self, clients: int, least: int, pace: float, ends: float) -> int:
        """Prompts of one arm in one turn; `pace`: seconds per answer."""
        wanted = max(LEAST_JOBS, JOBS_PER_CLIENT * clients, len(self.jobs.everything()) if self.full else 0)
        seconds = FILLED * (ends - time.perf_counter()) / (TURNS * len(self.target.arms))
        return min(wanted, max(least, int(seconds / pace)))

    async def _turns(self, load: Load, temperature: float, count: int, ends: float) -> list[LoadCell]:
        """A cell for each arm. The arms change places from turn to turn, so that none always follows the same one."""
        arms, took = self.target.arms, 0.0
        row = {arm: LoadCell(load, arm, temperature) for arm in arms}
        for turn in range(TURNS):
            began = time.perf_counter()
            if turn and began + took / 2 > ends:
                break
            jobs = self.jobs.take(count, temperature, turn * count)
            self.target.prepare(jobs)
            first = turn % len(arms)
            runs = {
                arm: await load.run(jobs, partial(self.target.answer, arm=arm))
                for arm in (*arms[first:], *arms[:first])
            }
            for arm, cell in row.items():
                cell.add(runs[arm], runs[OFF])
            took = time.perf_counter() - began
        return list(row.values())


def to_data(cells: Sequence[LoadCell]) -> list[dict[str, Any]]:
    """One entry per cell; times are seconds. `ratio`, `low` and `high` are null where texts differ, times where there
    were none.
    """
    entries = []
    for cell in cells:
        load = cell.load
        ratio, low, high = cell.ratio or (None, None, None)
        entries.append(
            {
                **({"clients": load.clients} if isinstance(load, ClosedLoop) else {"rate": load.rate}),
                "arm": cell.arm,
                "temperature": cell.temperature,
                "tokens_per_second": cell.tokens_per_second,
                "ratio": ratio,
                "low": low,
                "high": high,
                "first_token_p50": cell.first(50),
                "first_token_p95": cell.first(95),
                "between_tokens_p50": cell.between(50),
                "between_tokens_p95": cell.between(95),
                "prompt_share": cell.prompt_share,
                "equal": cell.equal,
                "total": cell.total,
            }
        )
    return entries
