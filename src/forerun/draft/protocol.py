"""What every drafter looks like: it follows sequences, proposes tokens when asked, and is never trusted.

A proposal is checked token by token by the target. A drafter that is wrong, late or broken costs speed, never a
wrong token, so the protocol has no way to report success or failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.sample.row import Row


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


class Drafter(Protocol):
    """Proposes tokens for many sequences. Keeps its own state for each, between `open` and `close`."""

    name: str
    wants_features: bool  # does it look inside the target? Then `feed` is called.

    def open(self, sequence_id: int, tokens: list[int]) -> None:
        """A sequence begins; `tokens` is its prompt."""
        ...

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        """Tokens were committed: every one after the prompt comes by here once, in order, the pending one included."""
        ...

    def feed(self, sequence_id: int, features: Tensor) -> None:
        """What the target computed at committed positions [rows, features], from the first prompt token on, in order.

        By then the tokens up to and including the one after the last of these positions are known, except at the end
        of the prompt. Called only when `wants_features` is set. Keep a copy: the tensor may be reused.
        """
        ...

    def propose(self, wants: list[Want]) -> list[Draft]:
        """One draft for each want, in the same order. A draft may be shorter than asked for, or empty."""
        ...

    def ready(self, sequence_id: int) -> int:
        """How much speaks for a draft now; 0: nothing. Cheap; called only for a sequence that was told everything.

        A lookup says how many tokens match, others just whether they can draft.
        """
        ...

    def close(self, sequence_id: int) -> None:
        """The sequence is over; forget it. Closing one that is not open does nothing."""
        ...
