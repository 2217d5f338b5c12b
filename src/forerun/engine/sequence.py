"""One generation in progress: its tokens, its caches, what it has emitted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from forerun.cache.pages import SequenceCache
from forerun.engine.request import Request
from forerun.sample.constraint import Constraint
from forerun.sample.history import TokenHistory


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # for pages
    PREFILL = "prefill"
    RUNNING = "running"
    PARKED = "parked"  # waits for a place in the rounds; its pages are in host memory, or still its own
    PAUSED = "paused"  # by its owner; its pages are its own until somebody else needs them
    FINISHED = "finished"


class TextSink(Protocol):
    """Turns tokens into text and watches for stop strings."""

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string was completed."""
        ...

    def flush(self) -> str:
        """What was held back."""
        ...


@dataclass(slots=True)
class Logprob:
    """How likely the target itself finds a token: of its logits as they are, before anything edits or cools them."""

    value: float
    top: list[tuple[int, float]] = field(default_factory=list)  # the likeliest tokens, ties by the lower id


@dataclass(slots=True)
class Emission:
    """One token handed to the owner of a sequence."""

    token: int
    text: str
    from_draft: bool
    arm: str = ""  # that drafted it; empty where the model itself chose it
    round: int = 0  # the target pass it came out of; 0: that of the prompt
    logprob: Logprob | None = None  # where the request asks for them


@dataclass(slots=True)
class ArmUse:
    """What one arm did for a generation."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """What a generation cost and gained."""

    queried: int = 0  # tokens of the prompt that were looked up in the cache, and those found
    cached: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0  # part of decode_seconds
    arms: dict[str, ArmUse] = field(default_factory=dict)  # "plain" among them
    per_position: list[list[int]] = field(default_factory=list)  # [drafts that reached a position, accepted there]
    _last: ArmUse = field(default_factory=ArmUse)  # the arm of the latest round

    def count(self, arm: str | None, drafted: int, accepted: int) -> None:
        """One round."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self._last = self.arms.setdefault("plain" if drafted == 0 else arm or "plain", ArmUse())
        self._last.rounds += 1
        self._last.drafted += drafted
        self._last.accepted += accepted
        if not drafted:
            return
        while len(self.per_position) < drafted:
            self.per_position.append([0, 0])
        for position in range(drafted):
            self.per_position[position][0] += 1
            self.per_position[position][1] += position < accepted

    def spend(self, seconds: float, drafting: float) -> None:
        """What the round just counted took in all, and for its drafts."""
        self.decode_seconds += seconds
        self.draft_seconds += drafting
        self._last.seconds += seconds


@dataclass(slots=True)
class Followed:
    """The entries of a row drafter that are true: from position `start` on."""

    start: int
    stop: int | None = None  # of one that catches up later; None: it follows every round, up to what is kept


@dataclass(slots=True, eq=False)
class Sequence:
    """All state of one generation. Everything in it is consistent between two steps of the engine."""

    id: int
    request: Request
    cache: SequenceCache
    history: TokenHistory
    sink: TextSink
    limit: int  # tokens, prompt included, at which it must end
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop: int | None = None  # the token of `Request.stop_ids` that ended it
    stop_logprob: Logprob | None = None  # of that token, where the request asks for them
    emissions: deque[Emission] = field(default_factory=deque)
    counters: Counters = field(default_factory=Counters)
    warnings: list[str] = field(default_factory=list)
    error: Exception | None = None
    admitted: float | None = None  # when it got its pages
    given_up: bool = False  # its pages were given back: it cannot be continued
    constraint: Constraint | None = None  # what may come next
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of every prompt token after the first, if asked for
    arms: list[str] = field(default_factory=list)  # drafters it may use
    dropped: list[str] = field(default_factory=list)  # drafters that failed, until the policy has heard of it
    told: dict[str, int] = field(default_factory=dict)  # tokens each text drafter has observed; others are not open
    followed: dict[str, Followed] = field(default_factory=dict)  # by row drafter
    planned: int = 0  # tokens of its prompt that rounds were planned for
    ahead: int = 0  # rows of it in rounds under way, at most; the host does not know yet how many of them are kept
    seconds_saved: float = 0.0  # against plain decoding, by what plain rounds of as many sequences cost

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def answer(self) -> list[int]:
        """Tokens emitted so far; the end token is not among them."""
        return self.tokens[self.prompt_length :]

    @property
    def pending(self) -> int:
        """Emitted, but not yet in the cache."""
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.limit - len(self.tokens)

    @property
    def is_under_way(self) -> bool:
        """Is there a round under way that will give it a token?"""
        return self.ahead > 0 or (self.status is Status.PREFILL and self.planned == self.prompt_length)

    @property
    def reach(self) -> int:
        """Tokens that the cache may hold of it when the round under way has ended."""
        return max(self.cache.length, self.planned) + self.ahead

    @property
    def resumed_status(self) -> Status:
        """What it goes on with once it has its pages: its answer, or what is left of its prompt."""
        return Status.RUNNING if len(self.tokens) > self.prompt_length else Status.PREFILL

    def emit(self, token: int, from_draft: bool, arm: str | None = None, logprob: Logprob | None = None) -> bool:
        """Take one token that plain decoding would emit here. True when it was the last. `arm`: of the round."""
        if token in self.request.stop_ids:
            self.stop, self.stop_logprob = token, logprob
            self.finish("stop")
            return True
        first = len(self.tokens) == self.prompt_length  # it comes out of the prompt
        self.tokens.append(token)
        self.history.append(token)
        if self.constraint is not None:
            self.constraint.commit(token)
        text, stopped = self.sink.push(token)
        arm = arm if from_draft and arm else ""
        round = 0 if first else self.counters.rounds + 1
        self.emissions.append(Emission(token, text, from_draft, arm, round, logprob))
        if stopped:
            self.finish("stop")
        elif self.remaining <= 0:
            self.finish("length")
        return self.status is Status.FINISHED

    def has_read_prompt(self) -> None:
        """Its prompt is in the cache, and drafters have heard of it. Pages that have to go are copied and never
        computed again, so nobody will want its media: their rows go.
        """
        self.status = Status.RUNNING
        if self.request.media is not None:
            self.request = replace(self.request, media=None)

    def fail(self, error: Exception) -> None:
        """It cannot go on; its owner gets the error."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str) -> None:
        """End it; pages stay until the owner releases them, so that it can be continued."""
        self.status, self.finish_reason = Status.FINISHED, reason
