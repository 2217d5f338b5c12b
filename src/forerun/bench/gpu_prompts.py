"""How long prompts take on a GPU, alone and many at once, and what they cost an answer that is running meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from forerun.bench.gpu_subjects import Subject
from forerun.engine.sequence import Sequence, Status

Cells = Iterator[tuple[str, float]]
REPEATS = 3
SEVERAL = 1.0  # seconds: what takes longer is measured once


def fitting(subject: Subject) -> list[int]:
    """Lengths of prompts that its context holds."""
    return [length for length in subject.scale.prompts if length + 1 < subject.engine.longest]


def read_often(subject: Subject, lengths: list[int], draft: str = "off") -> float:
    """Median seconds of reading prompts; the first time is thrown away: it captures graphs."""
    subject.read(lengths, draft=draft)
    found = [subject.read(lengths, draft=draft)]
    while len(found) < REPEATS and found[0] < SEVERAL:
        found.append(subject.read(lengths, draft=draft))
    return statistics.median(found)


def single_prompts(subject: Subject) -> Cells:
    """One prompt, from the request to its first token; and a token of its answer behind so long a text."""
    for length in fitting(subject):
        plain = read_often(subject, [length])
        yield f"prompt_{length}_ms", 1e3 * plain
        if subject.drafter is not None:
            drafting = read_often(subject, [length], subject.drafter)
            yield f"prompt_{length}_off_over_{subject.drafter}", plain / drafting
        sequence = subject.running(length)
        yield f"token_behind_{length}_ms", 1e3 * statistics.median(gaps(subject, sequence, subject.scale.gaps // 4))
        subject.stop()


def many_prompts(subject: Subject) -> Cells:
    """Several at once, until all have their first token."""
    lengths, alone = fitting(subject), dict[int, float]()
    room = subject.engine.pool.count * subject.scale.page
    for number, length in subject.scale.crowds:
        if length not in lengths or number * (length + 2 * subject.scale.page) > room:
            continue
        if length not in alone:
            alone[length] = read_often(subject, [length])
        together = read_often(subject, [length] * number)
        yield f"prompts_{number}x{length}_ms", 1e3 * together
        yield f"prompts_{number}x{length}_over_one", together / alone[length]


def between_tokens(subject: Subject) -> Cells:
    """Times between tokens of an answer while the longest prompt comes in, beside those of the same answer in peace."""
    length = fitting(subject)[-1]
    found: tuple[list[float], list[float], float] = ([], [], 0.0)
    for _ in range(2):  # the first time captures graphs and finds out what rows of prompts cost
        answer = subject.running(subject.scale.short)
        quiet = gaps(subject, answer, subject.scale.gaps)
        began, reading = time.perf_counter(), subject.begin(length, 1)
        busy = gaps(subject, answer, None, reading)
        found = quiet, busy, time.perf_counter() - began
        subject.stop()
    quiet, busy, seconds = found
    p95 = [1e3 * highest(each) for each in (quiet, busy)]
    yield f"beside_{length}_quiet_p95_ms", p95[0]
    yield f"beside_{length}_p50_ms", 1e3 * statistics.median(busy)
    yield f"beside_{length}_p95_ms", p95[1]
    yield f"beside_{length}_p95_over_quiet", p95[1] / p95[0]
    yield f"beside_{length}_tokens", float(len(busy))
    yield f"beside_{length}_first_token_ms", 1e3 * seconds


def gaps(subject: Subject, answer: Sequence, number: int | None, reading: Sequence | None = None) -> list[float]:
    """Seconds between arrivals of tokens of an answer: so many, or until a prompt has been read."""
    marks, tokens = [time.perf_counter()], len(answer.tokens)

    def ended() -> bool:
        nonlocal tokens
        if len(answer.tokens) > tokens:
            tokens = len(answer.tokens)
            marks.append(time.perf_counter())
        if answer.status is not Status.RUNNING:
            raise AssertionError("the answer ended while it was timed")
        return len(marks) > number if reading is None else reading.status is Status.FINISHED and len(marks) > 1  # type: ignore[operator]

    subject.until(ended)
    return [after - before for before, after in pairwise(marks)]


def highest(seconds: list[float]) -> float:
    """The 95th percentile: at most one in twenty is above it."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
