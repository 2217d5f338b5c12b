"""Models that the GPU suites measure, and how their engines are driven: random weights in real shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.bench.random_model import RandomCheckpoint
from forerun.cache.pages import PagePool
from forerun.device import Machine
from forerun.draft.arms import MAX_DEPTH
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import RowDrafter
from forerun.engine.device_runner import DeviceRunner
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.engine.warmup import Silence
from forerun.errors import ForerunError
from forerun.loading import DEVICE_CHUNK, load_model
from forerun.models.families import build
from forerun.models.gemma4_assistant import build_assistant, read_assistant
from forerun.progress import NullProgress
from forerun.sample.parameters import SamplingParams

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    context: int = 34_000
    pages: int = 1200  # of the cache: eight prompts of 8000 tokens
    page: int = 64
    slots: int = 65  # of recurrent state
    chunk: int = DEVICE_CHUNK
    draft_vocabulary: int = 32_768
    short: int = 100  # tokens of the prompt of an answer whose rounds are timed
    steps: int = 40  # rounds that are timed together
    repeats: int = 5
    gaps: int = 200  # times between tokens of an answer that nothing disturbs
    prompts: tuple[int, ...] = (200, 1000, 8000, 32_000)
    crowds: tuple[tuple[int, int], ...] = (
        (16, 200),
        (64, 200),
        (8, 1000),
        (8, 8000),
    )  # prompts at once, tokens of each


class TooLong(ForerunError):
    """Something did not end within the time that it had."""


class Subject:
    """A model to measure, and the time that is left for it."""

    def __init__(self, name: str, engine: Engine, scale: Scale, heads: bool) -> None:
        """`heads`: does it have a drafter of one layer or an assistant?"""
        self.name, self.engine, self.scale = name, engine, scale
        self.drafter = next(iter(engine.drafters.rows), None) if heads else None
        self.deadline = float("inf")  # by `time.perf_counter`

    @property
    def runner(self) -> DeviceRunner:
        """Of its engine."""
        assert isinstance(self.engine.runner, DeviceRunner)
        return self.engine.runner

    def begin(self, length: int, tokens: int, **options: Any) -> Sequence:
        """A request."""
        prompt = tuple((31 * n + 5) % self.engine.vocab for n in range(length))
        given = {"draft": "off"} | options
        return self.engine.submit(Request(prompt, given.pop("sampling", GREEDY), tokens, **given), Silence())

    def running(self, length: int, **options: Any) -> Sequence:
        """A sequence in the middle of its answer."""
        sequence = self.begin(length, self.engine.longest - length - MAX_DEPTH - 1, **options)
        self.until(lambda: sequence.counters.rounds >= min(10, self.scale.steps))
        return sequence

    def until(self, done: Callable[[], bool]) -> None:
        """Rounds, one after another. What a sequence fails of is raised here."""
        while not done():
            if time.perf_counter() > self.deadline:
                raise TooLong("it took longer than it may")
            self.engine.step()
            for sequence in self.engine.scheduler.active:
                if sequence.error is not None:
                    raise sequence.error

    def stop(self) -> None:
        """End all that runs."""
        for sequence in [*self.engine.scheduler.active, *self.engine.scheduler.waiting]:
            self.engine.release(sequence)

    def read(self, lengths: list[int], **options: Any) -> float:
        """Seconds from so many prompts to the first tokens of all."""
        began = time.perf_counter()
        sequences = [self.begin(length, 1, **options) for length in lengths]
        self.until(lambda: all(sequence.status is Status.FINISHED for sequence in sequences))
        seconds = time.perf_counter() - began
        self.stop()
        return seconds

    def replays(self) -> tuple[Callable[[], Any] | None, Callable[[], Any]]:
        """What the last rounds launched, to be launched again: the drafts, if there were any, and the pass."""
        self.engine.settle()
        drafts, passes = list(self.runner._drafts.values()), list(self.runner._rounds.values())
        return (drafts[-1] if drafts else None), passes[-1]


def random_subject(
    name: str, config: dict[str, Any], assistant: dict[str, Any] | None, machine: Machine, scale: Scale
) -> Subject:
    """A model with random weights; its head drafts from a reduced vocabulary."""
    kernels, device, dtype = machine.kernels, machine.device, machine.dtype
    decoder = build(RandomCheckpoint(config, device), kernels, device, dtype, NullProgress())
    vocab, reach = decoder.config.vocab, scale.context + 2 * (MAX_DEPTH + 1)
    decoder.rope.reserve(reach)
    head, rows = decoder.native_head(), dict[str, RowDrafter]()
    if head is not None:
        head.vocabulary = torch.arange(min(scale.draft_vocabulary, vocab), device=device)
        head.output = kernels.matrix(decoder.output_rows(head.vocabulary).to(dtype), None)
        head.rope.reserve(reach)
        decoder.taps = head.taps
        rows["mtp"] = MtpDrafter(head, vocab)
    if assistant is not None:
        own = RandomCheckpoint(assistant, device)
        rows["assistant"] = AssistantDrafter(build_assistant(read_assistant(own.reader), own, decoder, "n-1"), vocab)
    parts = {drafter.name: drafter.specs for drafter in rows.values()}
    pool = PagePool.for_model(
        decoder.config, scale.pages, scale.page, dtype, device, slots=scale.slots, on_device=True, parts=parts
    )
    # Prompts are read again and again: what was read before must not help.
    engine = Engine(decoder, pool, rows, vocab=vocab, context=scale.context, chunk=scale.chunk, prefix_cache=False)
    return Subject(name, engine, scale, bool(rows))


def built_in(model: str, scale: Scale) -> Subject:
    """The real small model with its head."""
    loaded = load_model(model, device="cuda", prefix_cache=False)
    return Subject(
        "smollm2", loaded.engine, replace(scale, context=loaded.engine.context), "mtp" in loaded.engine.drafters
    )
