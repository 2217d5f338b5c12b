"""Constraints for tests: what may come next as a plain function of the answer so far, and one that breaks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import numpy as np

from forerun.sample.masks import Masks, packed

Rule = Callable[[tuple[int, ...]], Collection[int]]


class ByRule:
    """Follows a rule by asking it again for every row: slow, and plain to see."""

    def __init__(self, rule: Rule, vocab: int) -> None:
        self.rule, self.vocab = rule, vocab
        self.answer: tuple[int, ...] = ()

    def legal(self, drafts: Sequence[int]) -> int:
        for count, token in enumerate(drafts):
            if token not in self.rule((*self.answer, *drafts[:count])):
                return count
        return len(drafts)

    def masks(self, drafts: Sequence[int]) -> Masks:
        assert self.legal(drafts) == len(drafts), "drafts are cut before masks are asked for"
        texts = [(*self.answer, *drafts[:count]) for count in range(len(drafts) + 1)]
        return np.stack([packed(self.rule(text), self.vocab) for text in texts])

    def forced(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(only := self.rule((*self.answer, *found))) == 1:
            found.extend(only)
        return found

    def commit(self, token: int) -> None:
        assert token in self.rule(self.answer)
        self.answer = (*self.answer, token)


class Breaking(ByRule):
    """Raises when one of its methods is called for the n-th time."""

    def __init__(self, rule: Rule, vocab: int, method: str, spared: int) -> None:
        super().__init__(rule, vocab)
        self.method, self.spared, self.error = method, spared, ValueError(f"broken {method}")

    def _count(self, method: str) -> None:
        if method == self.method:
            self.spared -= 1
            if self.spared < 0:
                raise self.error

    def legal(self, drafts: Sequence[int]) -> int:
        self._count("legal")
        return super().legal(drafts)

    def masks(self, drafts: Sequence[int]) -> Masks:
        self._count("masks")
        return super().masks(drafts)

    def forced(self, most: int) -> list[int]:
        self._count("forced")
        return super().forced(most)

    def commit(self, token: int) -> None:
        self._count("commit")
        super().commit(token)


def random_rule(seed: int, vocab: int, first: int = 4) -> Rule:
    """By the last two tokens a few that may come, often only one; the same after the same two."""

    @lru_cache(10_000)
    def after(last: tuple[int, ...]) -> list[int]:
        digest = hashlib.blake2b(repr((seed, last)).encode()).digest()
        few = (1, 1, 2, 4, 30, 200)[digest[0] % 6]
        picked = np.random.default_rng(list(digest[:8])).choice(vocab - first, few, replace=False) + first
        return sorted(picked.tolist())

    return lambda answer: after(answer[-2:])
