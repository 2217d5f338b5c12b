"""What the server wants of an engine: a place for one on another machine later, and for a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from forerun.engine.request import Request
from forerun.engine.sequence import Emission, Logprob, TextSink
from forerun.response import Response
from forerun.sample.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Work:
    """One answer: a request, where its text goes, and what may come next in it."""

    request: Request
    sink: TextSink
    constraint: Constraint | None = None
    progress: bool = False  # tell how much of the prompt has been read


@dataclass(frozen=True, slots=True)
class PromptRead:
    """How much of a prompt has been read."""

    read: int
    total: int
    seconds: float  # since it was begun
    cached: int = 0  # part of `read`: they were in the cache


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of an answer. `tail` is text that was held back until then."""

    reason: str  # "stop", "length" or "cancelled"
    tail: str
    response: Response
    stop: int | None = None  # the token of `Request.stop_ids` that ended it, if one did
    queue_seconds: float = 0.0  # before its prompt was begun
    first_token_seconds: float = 0.0  # since it was submitted
    stop_logprob: Logprob | None = None  # of `stop`, where the request asks for them


class Answer(Protocol):
    """Iterate: the emissions of a round, or of several where the reader is late, then one `Ended`.

    Before the first of them comes a `PromptRead` after every pass over part of the prompt, if `Work.progress` asks.

    A failure is raised, for this answer alone.
    """

    prompt_logprobs: Sequence[Logprob]  # from the first item on, where `Request.prompt_logprobs` asks for them

    def __aiter__(self) -> AsyncIterator[PromptRead | Sequence[Emission] | Ended]: ...

    async def close(self) -> None:
        """Stop it and free its memory. Safe at any time and any number of times."""
        ...


@dataclass(frozen=True, slots=True)
class EngineState:
    """For /health, /metrics, /stats and the page."""

    status: Literal["loading", "ready", "draining", "broken"]
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0  # share of the pages that are in use
    tokens_per_second: float = 0.0  # of the whole engine, over the last seconds
    accepted_share: float | None = None  # of drafts, lately
    tokens_per_round: float | None = None
    arms: dict[str, int] = field(default_factory=dict)  # rounds of each arm since the start
    warnings: Sequence[str] = ()  # what whoever runs the server should know: a drafter that is never right


class EngineClient(Protocol):
    """Submits work and tells how the engine is."""

    async def start(self, work: Sequence[Work]) -> Sequence[Answer]:
        """Queue the choices of one request, all or none. `ApiError` 400 never fits, 429 queue full, 503 not ready."""
        ...

    def state(self) -> EngineState: ...
