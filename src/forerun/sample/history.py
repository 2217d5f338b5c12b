"""The tokens of one sequence as penalties need them: which ids were seen, and how often the answer used each."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class _Counts:
    """Distinct ids in order of first sight and their counts, in arrays that grow by doubling."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids: Ids = np.empty(16, dtype=np.int64)
        self._counts: Ids = np.zeros(16, dtype=np.int64)

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        self._counts[slot] += 1

    def view(self, extra: Sequence[int]) -> tuple[Ids, Ids]:
        """(ids, counts) as if the tokens of `extra` had been added too; nothing is changed."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        if not extra:
            return ids, counts
        unseen = list(dict.fromkeys(token for token in extra if token not in self._slots))
        slots = {token: size + n for n, token in enumerate(unseen)}
        ids = np.concatenate([ids, np.array(unseen, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(unseen), dtype=np.int64)])
        for token in extra:
            counts[self._slots.get(token, slots.get(token, -1))] += 1
        return ids, counts


class TokenHistory:
    """The committed tokens of one sequence. Only committed tokens are appended, so there is nothing to roll back.

    >>> history = TokenHistory([5, 6])
    >>> history.append(6)
    >>> [array.tolist() for array in history.answer(drafted=(9,))]
    [[6, 9], [1, 1]]
    """

    __slots__ = ("_answer", "_emitted", "_prompt", "_seen")

    def __init__(self, prompt: Iterable[int] = (), answer: Iterable[int] = ()) -> None:
        self._seen = _Counts()
        self._answer = _Counts()
        # Tokens that are not counted yet: most requests have no penalties, and never ask.
        self._prompt: list[int] = list(prompt)
        self._emitted: list[int] = list(answer)

    def append(self, token: int) -> None:
        """One more token of the answer."""
        self._emitted.append(token)

    def _count(self) -> None:
        for token in self._prompt:
            self._seen.add(token)
        for token in self._emitted:
            self._seen.add(token)
            self._answer.add(token)
        self._prompt.clear()
        self._emitted.clear()

    def seen(self, drafted: Sequence[int] = ()) -> Ids:
        """Distinct ids of prompt, answer and `drafted`. Read it at once: it may be a view of a growing array."""
        self._count()
        return self._seen.view(drafted)[0]

    def answer(self, drafted: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """Distinct ids of answer and `drafted`, and their counts. Read them at once, like `seen`."""
        self._count()
        return self._answer.view(drafted)
