"""What an engine did since it started, and what it did lately."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forerun.engine.sequence import Sequence
from forerun.serve.histogram import HISTOGRAMS, Histogram

WINDOW, BIN = 5.0, 0.25  # seconds that count as lately, and to which they are rounded


@dataclass(slots=True)
class Bin:
    """A short stretch of time, or one round."""

    began: float
    read: int = 0  # prompt tokens
    tokens: int = 0
    rounds: int = 0  # of single sequences
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Bin) -> None:
        """What another one had."""
        self.read += other.read
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.drafted += other.drafted
        self.accepted += other.accepted


class Recent:
    """The last seconds. One thread writes, any may read."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque([Bin(time.perf_counter())], maxlen=int(WINDOW / BIN) + 1)

    def add(self, round: Bin) -> None:
        """What one round of the engine gave."""
        if round.began - self._bins[-1].began >= BIN:
            self._bins.append(Bin(round.began))
        self._bins[-1].add(round)

    def sum(self, now: float) -> Bin:
        """Of the bins that are not older than the window; `began` is when the oldest of them did."""
        bins = [one for one in self._bins.copy() if now - one.began <= WINDOW]
        total = Bin(min((one.began for one in bins), default=now))
        for one in bins:
            total.add(one)
        return total


class UnderWay(Protocol):
    """An answer that has not ended."""

    @property
    def sequence(self) -> Sequence | None: ...


@dataclass(slots=True)
class AnswerTotals:
    """Sums over answers: those that have ended and those under way."""

    rounds: int = 0
    drafts: int = 0  # rounds that had any
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    arms: Counter[str] = field(default_factory=Counter)  # rounds of each
    accepted_at: Counter[int] = field(default_factory=Counter)  # by position of the draft
    prompt_tokens: int = 0
    queried: int = 0  # tokens of prompts that were looked up in the cache, and those found
    cached: int = 0
    generated: int = 0

    def add(self, sequence: Sequence) -> None:
        """One answer, as far as it has come."""
        counters = sequence.counters
        self.rounds += counters.rounds
        self.drafted += counters.drafted
        self.accepted += counters.accepted
        self.draft_seconds += counters.draft_seconds
        self.verify_seconds += counters.decode_seconds - counters.draft_seconds
        for arm, use in list(counters.arms.items()):
            self.arms[arm] += use.rounds
            self.drafts += use.rounds if arm != "plain" else 0
        for position, (_, accepted) in enumerate(list(counters.per_position)):
            self.accepted_at[position] += accepted
        self.queried += counters.queried
        self.cached += counters.cached
        self.generated += len(sequence.tokens) - sequence.prompt_length
        if len(sequence.tokens) > sequence.prompt_length:
            self.prompt_tokens += sequence.prompt_length

    def merge(self, other: AnswerTotals) -> None:
        """Those of another engine."""
        self.rounds += other.rounds
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.draft_seconds += other.draft_seconds
        self.verify_seconds += other.verify_seconds
        self.arms.update(other.arms)
        self.accepted_at.update(other.accepted_at)
        self.prompt_tokens += other.prompt_tokens
        self.queried += other.queried
        self.cached += other.cached
        self.generated += other.generated

    def copy(self) -> AnswerTotals:
        """For adding those under way."""
        return replace(self, arms=self.arms.copy(), accepted_at=self.accepted_at.copy())


@dataclass(slots=True)
class Times:
    """When what happened to an answer."""

    submitted: float
    begun: float | None = None  # when its prompt was
    first: float | None = None  # when its first token came
    latest: float = 0.0  # when its last tokens came
    ended: float = 0.0


class Tally:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.mean_seconds = 1.0  # of an answer, lately
        self.reasons: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.between_tokens = self.histograms["inter_token_latency_seconds"]
        self.per_round = self.histograms["iteration_tokens_total"]
        self._ended = AnswerTotals()
        self._lock = threading.Lock()  # an answer that ends is counted at every moment, and once

    def round(self, round: Bin) -> None:
        """One round of the engine."""
        self.recent.add(round)
        if round.tokens or round.read:
            self.per_round.add(round.tokens + round.read)

    def ended(self, answers: MutableMapping[int, Any], sequence: Sequence) -> None:
        """It is no longer under way."""
        with self._lock:
            del answers[sequence.id]
            self._ended.add(sequence)

    def finished(self, reason: str, times: Times, sequence: Sequence) -> None:
        """An answer is over, for whatever reason."""
        took, generated = times.ended - times.submitted, len(sequence.tokens) - sequence.prompt_length
        self.mean_seconds += 0.1 * (took - self.mean_seconds)
        self.reasons[reason] += 1
        add = {name: histogram.add for name, histogram in self.histograms.items()}
        add["e2e_request_latency_seconds"](took)
        add["request_prompt_tokens"](sequence.prompt_length)
        add["request_generation_tokens"](generated)
        if times.begun is None:
            return
        add["request_queue_time_seconds"](times.begun - times.submitted)
        add["request_inference_time_seconds"](times.ended - times.begun)
        if times.first is not None:
            add["time_to_first_token_seconds"](times.first - times.submitted)
            add["request_prefill_time_seconds"](times.first - times.begun)
            add["request_decode_time_seconds"](times.latest - times.first)
            if generated > 1:
                add["request_time_per_output_token_seconds"]((times.latest - times.first) / (generated - 1))

    def totals(self, answers: Mapping[int, UnderWay]) -> AnswerTotals:
        """Of all answers there ever were."""
        with self._lock:
            found = self._ended.copy()
            for answer in list(answers.values()):
                if answer.sequence is not None:
                    found.add(answer.sequence)
        return found
