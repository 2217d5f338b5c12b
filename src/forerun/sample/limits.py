"""A least number of tokens, and two constraints at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.sample.constraint import Constraint
from forerun.sample.masks import Masks, everything, packed


class MinTokens:
    """A `Constraint`: no stop token among the first `least` tokens."""

    def __init__(self, least: int, stop_ids: frozenset[int], vocab: int) -> None:
        self._left, self._stop_ids = least, stop_ids
        self._whole = everything(1, vocab)[0]
        self._going_on = self._whole & ~packed(stop_ids, vocab)

    def legal(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        early = drafts[: self._left]
        return next((place for place, token in enumerate(early) if token in self._stop_ids), len(drafts))

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """See `Constraint`."""
        if not self._left:
            return None
        return np.stack([self._going_on if row < self._left else self._whole for row in range(len(drafts) + 1)])

    def forced(self, most: int) -> list[int]:  # noqa: ARG002
        """Nothing."""
        return []

    def commit(self, token: int) -> None:  # noqa: ARG002
        """See `Constraint`."""
        self._left = max(0, self._left - 1)


class Both:
    """A `Constraint`: what two others allow. Where they share nothing, the first one's word counts."""

    def __init__(self, first: Constraint, second: Constraint) -> None:
        self._first, self._second = first, second

    def legal(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        return self._second.legal(drafts[: self._first.legal(drafts)])

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """See `Constraint`."""
        first, second = self._first.masks(drafts), self._second.masks(drafts)
        if first is None or second is None:
            return second if first is None else first
        shared: Masks = first & second
        return np.where(shared.any(axis=1, keepdims=True), shared, first)

    def forced(self, most: int) -> list[int]:
        """What the first forces, or else the second."""
        return self._first.forced(most) or self._second.forced(most)

    def commit(self, token: int) -> None:
        """See `Constraint`."""
        self._first.commit(token)
        self._second.commit(token)
