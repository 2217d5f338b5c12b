"""What an engine wants of an executor, and what it gets back: plans and outcomes of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from forerun.draft.protocol import Draft
from forerun.engine.sequence import Logprob, Sequence
from forerun.policy.costs import CostTable, RoundTime
from forerun.policy.decision import Decision
from forerun.progress import Progress
from forerun.sample.masks import Masks, Words
from forerun.sample.row import Row

NOTHING = Draft([], None)


@dataclass(slots=True)
class Turn:
    """One sequence's part in a round."""

    sequence: Sequence
    decision: Decision
    draft: Draft = field(default_factory=lambda: NOTHING)
    start: int = 0  # its first row in the pass
    shared: bool = False  # the decision was made for the whole batch
    asked: str | None = None  # the drafter that made the draft
    proposed: int = 0  # tokens it came with
    forced: list[int] = field(default_factory=list)  # by a constraint: drafts that cost nothing
    masks: Masks | None = None  # of its first rows
    cut: bool = False  # a draft behind the last one broke a rule
    error: Exception | None = None  # of its constraint: it takes no part in the pass

    @property
    def width(self) -> int:
        return 1 + len(self.draft.tokens)

    @property
    def drafted(self) -> int:
        """Drafts that count in its record: one that broke a rule is as wrong as one that the target rejects."""
        tokens, probabilities = self.draft.tokens, self.draft.probabilities
        return len(tokens) + (self.cut and probabilities is None)

    def rows(self) -> list[Row]:
        """What `choose` must know about each row: the exact history before it, drafted tokens included."""
        sequence, drafts = self.sequence, self.draft.tokens
        first = len(sequence.tokens)  # absolute index of the first token this round emits
        return [
            Row(sequence.request.sampling, sequence.history, tuple(drafts[:row]), first + row, self._allowed(row))
            for row in range(self.width)
        ]

    def _allowed(self, row: int) -> Words | None:
        """A row behind a draft that broke a rule is never reached."""
        return self.masks[row] if self.masks is not None and row < len(self.masks) else None


@dataclass(slots=True)
class PromptChunk:
    """A stretch of a prompt to read."""

    sequence: Sequence
    stop: int  # tokens of the prompt that are in the cache afterwards


@dataclass(slots=True)
class Plan:
    """One round: who runs and how, and which prompts are read beside it."""

    turns: list[Turn]
    prompts: list[PromptChunk]
    began: float  # when the host began to think about it

    def has(self, sequence: Sequence) -> bool:
        """Does it take part?"""
        return any(t.sequence is sequence for t in self.turns) or any(p.sequence is sequence for p in self.prompts)


@dataclass(slots=True)
class Result:
    """What a round gave one sequence, or what reading its prompt did. Nothing of it is emitted or kept yet."""

    turn: Turn
    tokens: list[int]  # accepted drafts and the token that ends the round; none where none could be decided on
    accepted: int
    drafted: int
    keep: Callable[[int], None]  # keep the rows of so many tokens in every cache, forget the rest
    seconds: float = 0.0  # by which its policy judges the round; of a prompt those it took to keep it
    took: float = 0.0  # that the sequence waited
    drafting: float = 0.0  # part of that
    logprobs: list[Logprob] = field(default_factory=list)  # of the tokens, where the request asks for them
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt tokens that its rows were followed by
    error: Exception | None = None
    prompt: bool = False  # it comes of reading a prompt
    advanced: bool = False  # the device has moved on by itself: the sequence cannot go back to before the round


@dataclass(slots=True)
class Outcome:
    """A round that has happened."""

    results: list[Result] = field(default_factory=list)
    prompts: list[Result] = field(default_factory=list)
    times: list[tuple[CostTable, RoundTime]] = field(default_factory=list)  # what there is to learn of costs
    ended: float = field(default_factory=time.perf_counter)  # when the executor was done with it
    again: Ticket | None = None  # the same turns were started again before anything else was done with this
    typical: bool = True  # its times tell what such rounds cost: nothing was compiled or captured for it


class Ticket(Protocol):
    """A round that was started."""

    plan: Plan


class GoesOn(Protocol):
    """Asked for each turn of a round, by its number, with its tokens and how many of its drafts were real."""

    def __call__(self, index: int, turn: Turn, tokens: list[int], drafted: int) -> bool: ...


class Executor(Protocol):
    """Turns plans into outcomes: at once, or while the host does other work."""

    runs_ahead: bool  # a round goes on while the outcome of the one before is delivered
    uniform: bool  # all sequences of a pass have as many rows as the one with most

    @property
    def batch_arm(self) -> str | None:
        """The arm that drafts for whole batches where rows are uniform; None: each sequence has its own."""
        ...

    def costs_of(self, sequences: list[Sequence]) -> CostTable:
        """What rounds of such sequences cost."""
        ...

    def start(self, plan: Plan) -> Ticket:
        """Start a round. What it raises leaves every sequence as it was, or ended with an error."""
        ...

    def finish(self, ticket: Ticket, again: GoesOn | None) -> Outcome:
        """Wait for it. Where `again` agrees to all its turns, the executor may start the same ones at once."""
        ...

    def prepare(self, widest: int, filtered: bool, progress: Progress, batch: int = 1) -> list[RoundTime]:
        """Get ready for whatever one sequence may want, at most `widest` rows, and for batches of up to so many.

        Returns what rounds cost, where measured.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence leaves for good or for a while: it holds nothing of the executor's any more."""
        ...
