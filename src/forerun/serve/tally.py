"""What an engine did since it started, and what it did lately."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forerun.engine.sequence import Sequence

WINDOW, BIN = 5.0, 0.25  # seconds that count as lately, and to which they are rounded


@dataclass(slots=True)
class Bin:
    """A short stretch of time."""

    began: float
    tokens: int = 0
    rounds: int = 0  # of single sequences
    drafted: int = 0
    accepted: int = 0


class Recent:
    """The last seconds. One thread writes, any may read."""

    def __init__(self) -> None:
        self._bins: deque[Bin] = deque([Bin(time.perf_counter())], maxlen=int(WINDOW / BIN) + 1)

    def add(self, now: float, tokens: int, rounds: int, drafted: int, accepted: int) -> None:
        """What one round of the engine gave."""
        last = self._bins[-1]
        if now - last.began >= BIN:
            last = Bin(now)
            self._bins.append(last)
        last.tokens += tokens
        last.rounds += rounds
        last.drafted += drafted
        last.accepted += accepted

    def sum(self, now: float) -> Bin:
        """Of the bins that are not older than the window; `began` is when the oldest of them did."""
        bins = [one for one in self._bins.copy() if now - one.began <= WINDOW]
        return Bin(
            min((one.began for one in bins), default=now),
            sum(one.tokens for one in bins),
            sum(one.rounds for one in bins),
            sum(one.drafted for one in bins),
            sum(one.accepted for one in bins),
        )


class UnderWay(Protocol):
    """An answer that has not ended."""

    @property
    def sequence(self) -> Sequence | None: ...


@dataclass(slots=True)
class Totals:
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
        self.generated += len(sequence.tokens) - sequence.prompt_length
        if len(sequence.tokens) > sequence.prompt_length:
            self.prompt_tokens += sequence.prompt_length

    def copy(self) -> Totals:
        """For adding those under way."""
        return replace(self, arms=self.arms.copy(), accepted_at=self.accepted_at.copy())


class Tally:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.mean_seconds = 1.0  # of an answer, lately
        self._ended = Totals()
        self._lock = threading.Lock()  # an answer that ends is counted at every moment, and once

    def ended(self, lives: MutableMapping[int, Any], sequence: Sequence) -> None:
        """It is no longer under way."""
        with self._lock:
            del lives[sequence.id]
            self._ended.add(sequence)

    def took(self, seconds: float) -> None:
        """How long an answer was here."""
        self.mean_seconds += 0.1 * (seconds - self.mean_seconds)

    def totals(self, lives: Mapping[int, UnderWay]) -> Totals:
        """Of all answers there ever were."""
        with self._lock:
            found = self._ended.copy()
            for live in list(lives.values()):
                if live.sequence is not None:
                    found.add(live.sequence)
        return found
