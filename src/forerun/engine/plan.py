"""What an engine hands to an executor and gets back: a round, its turns, and what it gave each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from forerun.draft.protocol import Draft
from forerun.engine.sequence import Logprob, Sequence
from forerun.policy.costs import CostTable, RoundTime
from forerun.policy.decision import PLAIN, Decision
from forerun.sample.masks import Masks, Words
from forerun.sample.row import Row

if TYPE_CHECKING:
    from forerun.engine.device import Launched

NOTHING = Draft([], None)


@dataclass(slots=True)
class Turn:
    """One sequence's part in a round: its pending token and drafts, or a stretch of its prompt."""

    sequence: Sequence
    decision: Decision = PLAIN
    draft: Draft = field(default_factory=lambda: NOTHING)
    stop: int = 0  # of a prompt: its tokens that are in the cache afterwards
    start: int = 0  # its first row in the pass
    first_logits: int = 0  # and the first of its rows among those that have logits
    shared: bool = False  # the decision was made for the whole batch
    expected: list[int] = field(default_factory=list)  # it was made ahead, and holds if these tokens come before
    unrun: list[tuple[str, list[int]]] = field(default_factory=list)  # arms and drafts of theirs that do not run
    asked: str | None = None  # the drafter that made the draft
    proposed: int = 0  # tokens it came with
    forced: list[int] = field(default_factory=list)  # by a constraint: drafts that cost nothing
    masks: Masks | None = None  # of its first rows
    cut: bool = False  # a draft behind the last one broke a rule
    error: Exception | None = None  # of its constraint: it takes no part in the pass

    @property
    def is_prompt(self) -> bool:
        return self.stop > 0

    @property
    def tokens(self) -> list[int]:
        """What its rows in the pass hold."""
        sequence = self.sequence
        if self.is_prompt:
            return list(sequence.request.prompt[sequence.cache.length : self.stop])
        return [sequence.pending, *self.draft.tokens]

    @property
    def width(self) -> int:
        """Rows that a token is chosen after: of a prompt the last one, once it is read."""
        if self.is_prompt:
            return int(self.stop == self.sequence.prompt_length)
        return 1 + len(self.draft.tokens)

    @property
    def drafted(self) -> int:
        """Drafts that count in its record: one that broke a rule is as wrong as one that the target rejects."""
        tokens, probabilities = self.draft.tokens, self.draft.probabilities
        return len(tokens) + (self.cut and probabilities is None)

    def holds_after(self, tokens: list[int]) -> bool:
        """Does a decision that was made ahead still hold, now that the round before it gave these tokens?"""
        return all(token == wanted for token, wanted in zip(tokens, self.expected, strict=False))

    def judge_unrun(self, tokens: list[int]) -> None:
        """Tell the policy what would have come of drafts that did not run; what lies behind `tokens` is unknown."""
        for arm, drafts in self.unrun:
            pairs = list(zip(drafts, tokens, strict=False))
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.sequence.policy.watch(arm, len(pairs), right)
        self.unrun = []

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
    advanced: bool = False  # the device has moved on by itself: the sequence cannot go back to before the round


@dataclass(slots=True)
class Round:
    """Who runs and how, and which prompts are read beside it; then what came of it."""

    turns: list[Turn]
    prompts: list[Turn]
    began: float  # when the host began to think about it
    results: list[Result] = field(default_factory=list)  # of turns
    read: list[Result] = field(default_factory=list)  # of prompts
    times: list[tuple[CostTable, RoundTime]] = field(default_factory=list)  # what there is to learn of costs
    ended: float = 0.0  # when the executor was done with it
    typical: bool = True  # its times tell what such rounds cost: nothing was compiled or captured for it
    launched: Launched | None = None  # the part of it that a device runs
    again: Round | None = None  # the same turns were started again before anything else was done with this

    @property
    def sequences(self) -> list[Sequence]:
        """All that take part."""
        return [turn.sequence for turn in [*self.turns, *self.prompts]]


# Asked for each turn of a round, by its number, with its tokens and how many of its drafts were real: does it go on?
GoesOn = Callable[[int, Turn, list[int], int], bool]
