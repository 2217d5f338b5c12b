"""What the engine hands to a runner and gets back: a plan of turns, and what each turn came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.cache.recurrent import SlotContents
from forerun.draft.protocol import Draft
from forerun.engine.sequence import Logprob, Sequence
from forerun.policy.decision import PLAIN, Decision
from forerun.sample.masks import Masks, Words
from forerun.sample.row import Row

NOTHING = Draft([], None)


@dataclass(slots=True)
class Turn:
    """One sequence's part in a round: its pending token and drafts, or a stretch of its prompt."""

    sequence: Sequence
    decision: Decision = PLAIN
    draft: Draft = field(default_factory=lambda: NOTHING)
    begin: int = 0  # of a prompt: the position of its first row
    stop: int = 0  # and the one behind its last; 0: its tokens are generated
    follows: frozenset[str] = frozenset()  # row drafters that write entries for its rows
    drafts_on_device: int = 0  # drafts that the host does not know
    state: SlotContents | None = None  # recurrent, after a stretch of a prompt, where it is to stay
    reserved: int = 0  # rows that were counted as under way
    forced: list[int] = field(default_factory=list)  # by a constraint: drafts that cost nothing
    masks: Masks | None = None  # of its first rows
    cut: bool = False  # a draft behind the last one broke a rule
    error: Exception | None = None  # of its constraint: it takes no part in the pass
    is_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_prompt = self.stop > 0

    @property
    def ends_prompt(self) -> bool:
        """Does the first token of the answer come out of it?"""
        return self.stop == self.sequence.prompt_length

    @property
    def written_by(self) -> frozenset[str]:
        """Row drafters that write entries for its rows: those that failed since it was planned do not."""
        return self.follows & set(self.sequence.arms) if self.follows else self.follows

    @property
    def tokens(self) -> list[int]:
        """What its rows hold."""
        if self.is_prompt:
            return list(self.sequence.request.prompt[self.begin : self.stop])
        return [self.sequence.pending, *self.draft.tokens]

    @property
    def width(self) -> int:
        """Rows that a token is chosen after: of a prompt the last one, once it is read."""
        return int(self.ends_prompt) if self.is_prompt else 1 + self.drafts

    @property
    def drafts(self) -> int:
        """Rows that hold drafts."""
        return self.drafts_on_device or len(self.draft.tokens)

    @property
    def drafted(self) -> int:
        """Drafts that count in its record: one that broke a rule is as wrong as one that the target rejects."""
        return self.drafts + (self.cut and self.draft.probabilities is None)

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
class Plan:
    """A round: which sequences generate and how, and which stretches of prompts are read in the same pass."""

    turns: list[Turn]
    began: float  # when the host began to think about it
    waited: bool = False  # it was planned when the tokens of the round before were known, for text drafters
    behind: bool = False  # the round before was taken in just now: the device has waited for the plan
    needs_host: bool = False  # the tokens of the round before must be known before it can start

    @property
    def generating(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.is_prompt]


@dataclass(slots=True)
class Outcome:
    """What a turn came to. Nothing of it is emitted or kept yet."""

    turn: Turn
    tokens: list[int]  # accepted drafts and the token that ends the round; none where none could be decided on
    accepted: int = 0
    drafted: int = 0
    by_host: bool = False  # a device has computed the logits, and the host has chosen
    features: Tensor | None = None  # [rows, features] of its rows, where a drafter reads them
    logprobs: list[Logprob] = field(default_factory=list)  # of the tokens, where the request asks for them
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt tokens that its rows were followed by
    error: Exception | None = None


@dataclass(slots=True)
class Ticket:
    """A round that was started."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)  # once they are known
    seconds: float = 0.0  # the round took in all
    drafting: dict[str, float] = field(default_factory=dict)  # of that each row drafter, where known apart
    typical: bool = True  # its time tells what such rounds cost: nothing was compiled or captured for it
    reads_back: bool = False  # the host reads logits or features of it, which the next round overwrites
    launched: Any = None  # what a device's runner keeps of it
