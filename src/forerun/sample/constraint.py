"""What may come next in one answer: grammars, thinking budgets, a least number of tokens. All decide by masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forerun.errors import ForerunError
from forerun.sample.masks import Masks


class ConstraintStuck(ForerunError):
    """What was asked for cannot be kept track of any longer: whoever asked for it can simplify it."""


class Constraint(Protocol):
    """The state of one answer; only committed tokens change it, so there is nothing to roll back."""

    def legal(self, drafts: Sequence[int]) -> int:
        """How many of the drafts, from the first on, may follow the committed tokens. Nothing is changed."""
        ...

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """What each row allows: the first follows the committed tokens, the others one more draft each.

        All drafts are legal. None: no row rules anything out. Nothing is changed.
        """
        ...

    def forced(self, most: int) -> list[int]:
        """Tokens of the only text that may come next, at most so many; a stop token may be the last.

        They are drafts that cost nothing. The text may be cut into tokens in other ways, so they are checked like any.
        """
        ...

    def commit(self, token: int) -> None:
        """This token was emitted. A stop token is not: it ends the answer."""
        ...
