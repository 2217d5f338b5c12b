"""The two kinds of drafters. Both propose tokens, and neither is ever trusted: the target checks every token.

A text drafter reads the tokens so far, on the host. A row drafter is a small network that goes along with the rows of
the target's passes: its keys and values lie in the target's pages, an entry at the position of its token. A drafter
that is wrong, late or broken costs speed, never a wrong token, so that neither protocol reports success or failure.
"""

# ruff: noqa: ARG002 - what a drafter does unless it says otherwise is mostly nothing

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from forerun.kernels.interface import AttentionSpec
from forerun.sample.row import Row

if TYPE_CHECKING:
    from forerun.cache.pages import PagePool
    from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class Draft:
    """Tokens proposed for one sequence, in order; an empty list means plain decoding this round."""

    tokens: list[int]
    # [k, V], row i is the distribution token i was drawn from (for `rejection`); None for deterministic drafts.
    probabilities: Tensor | None = None


@dataclass(slots=True)
class Want:
    """A request for up to `depth` tokens after everything committed so far in one sequence."""

    sequence_id: int
    depth: int
    # Describes the first drafted token (history, position, noise); later rows follow from it.
    row: Row
    # True when the tokens will be judged by rejection sampling rather than by the coupled rule.
    rejection: bool


class TextDrafter(Protocol):
    """Proposes tokens from the text alone. Keeps its own state for each sequence, between `open` and `close`."""

    name: str

    def open(self, sequence_id: int, tokens: list[int]) -> None:
        """A sequence begins; `tokens` is its prompt."""
        ...

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        """Tokens were committed: every one after the prompt comes by here once, in order, the pending one included."""
        ...

    def propose(self, wants: list[Want]) -> list[Draft]:
        """One draft for each want, in the same order. A draft may be shorter than asked for, or empty."""
        ...

    def ready(self, sequence_id: int) -> int:
        """How much speaks for a draft now; 0: nothing. Cheap; called only for a sequence that was told everything.

        A lookup says how many tokens match.
        """
        ...

    def peek(self, sequence_id: int, depth: int) -> list[int]:
        """What it would draft now, where that costs next to nothing; else nothing. Called after `ready`."""
        return []

    def close(self, sequence_id: int) -> None:
        """The sequence is over; forget it. Closing one that is not open does nothing."""
        ...


class RowDrafter(Protocol):
    """A network that drafts one token a step. Entry t of its keys and values is made from the token at position t and
    the target's features at t − 1, if it wants features; so a page of entries depends on the text up to its end alone.
    """

    name: str
    specs: Sequence[AttentionSpec] = ()  # of its layers that keep keys and values
    features: int = 0  # columns of the target's features that it reads; 0: none
    first: int = 0  # the first entry that there is
    warm: int | None = 0  # entries after which a late joiner drafts well; None: it must have all from the first on
    longest: int | None = None  # tokens of the longest text that it knows how to read
    vocab: int  # ids that it may draft
    vocabulary: Tensor | None = None  # target ids of the columns of its logits; None: they are the ids
    deterministic: bool = False  # under rejection: does it draft its likeliest token?

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own matrices."""
        ...

    def attach(self, pool: PagePool) -> None:
        """The pool that holds its entries, as `PagePool.parts` of its name, beside the target's."""
        ...

    def follow(self, batch: Pass, features: Tensor | None) -> None:
        """Write the entries of all rows of a pass; features [rows, features] of the positions before them."""
        ...

    def begin(self, features: Tensor | None) -> Tensor | None:
        """What the first step reads: of [sequences, features] at the last committed positions."""
        ...

    def place(self, step: int) -> int:
        """The position of the row of a step, counted from the pending token's."""
        return step

    def step(self, number: int, hidden: Tensor | None, batch: Pass) -> tuple[Tensor | None, Tensor]:
        """One row for each sequence, which holds the token before the one to draft: what the next step reads, and
        logits [sequences, columns]. `hidden`: of the step before, or from `begin`.
        """
        ...


Drafter = TextDrafter | RowDrafter


def is_row_drafter(drafter: Drafter) -> bool:
    """Does it go along with the target's passes?"""
    return hasattr(drafter, "step")
