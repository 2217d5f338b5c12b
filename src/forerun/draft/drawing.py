"""From a drafter's logits to drafted tokens, the same way for every drafter that has logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.draft.protocol import Draft, RowDrafter, Want
from forerun.sample.acceptance import draw
from forerun.sample.choose import choose, probabilities
from forerun.sample.row import Row, RowError


class Drawing:
    """The drafts of a row drafter, drawn depth by depth for all sequences together.

    Coupled drafts use the target's own noise, which is keyed by target ids; under rejection they must not. With a
    reduced `vocabulary` column n of the logits belongs to target id `vocabulary[n]`.
    """

    def __init__(self, wants: list[Want], drafter: RowDrafter) -> None:
        self.wants, self.vocab, self.vocabulary = wants, drafter.vocab, drafter.vocabulary
        self.deterministic = drafter.deterministic
        self.tokens: list[list[int]] = [[] for _ in wants]
        self._distributions: list[list[Tensor]] = [[] for _ in wants]
        self._full: Tensor | None = None  # [rows, vocab]; only the columns of the draft vocabulary are ever written

    def live(self, depth: int) -> list[int]:
        """Which drafts go on at this depth; one that came to an end earlier does not."""
        return [n for n, want in enumerate(self.wants) if depth < want.depth and len(self.tokens[n]) == depth]

    def draw(self, live: list[int], logits: Tensor) -> None:
        """Draw the next token of the drafts `live` from logits [live, vocabulary], one row for each."""
        largest, best = logits.max(dim=1)
        if not bool((largest < float("inf")).all()):  # not a number is not less either; −∞ rules a token out
            raise ArithmeticError("it gave numbers that are infinite or not a number")
        rows = [self._row(index) for index in live]
        drawn = [self.wants[index].rejection and not self.deterministic for index in live]
        sampled = [is_drawn and not row.params.greedy for is_drawn, row in zip(drawn, rows, strict=True)]
        coupled = [place for place, is_sampled in enumerate(sampled) if not is_sampled]
        for place, token in zip(coupled, self._choose(logits, best, rows, coupled), strict=True):
            if token is not None:
                self.tokens[live[place]].append(token)
        for place, is_sampled in enumerate(sampled):
            if is_sampled:
                self._sample(live[place], logits[place : place + 1], rows[place])

    def drafts(self) -> list[Draft]:
        """What was drawn."""
        return [
            Draft(tokens, torch.stack(mine) if mine else None)
            for tokens, mine in zip(self.tokens, self._distributions, strict=True)
        ]

    def _row(self, index: int) -> Row:
        first, drafted = self.wants[index].row, self.tokens[index]
        params = first.params
        if self.deterministic and self.wants[index].rejection:
            params = replace(params, temperature=0.0)
        return Row(params, first.history, tuple(drafted), first.position + len(drafted), first.allowed)

    def _choose(self, logits: Tensor, best: Tensor, rows: list[Row], places: list[int]) -> list[int | None]:
        """The target's choice if these were its logits; None where the draft vocabulary has nothing to choose from.

        `best`: the column of the largest logit of each row.
        """
        if not places:
            return []
        if len(places) < len(rows):
            logits, best, rows = logits[places], best[places], [rows[place] for place in places]
        if self.vocabulary is not None and all(is_argmax(row) for row in rows):
            return list(self.vocabulary[best].tolist())
        logits = self._spread(logits)
        try:
            return list(choose(logits, rows, self.vocab))
        except RowError:
            return [self._choose_alone(logits[n : n + 1], row) for n, row in enumerate(rows)]

    def _choose_alone(self, logits: Tensor, row: Row) -> int | None:
        try:
            return choose(logits, [row], self.vocab)[0]
        except RowError:
            return None

    def _sample(self, index: int, logits: Tensor, row: Row) -> None:
        try:
            q = probabilities(self._spread(logits), [row], self.vocab)[0]
        except RowError:
            return
        self.tokens[index].append(draw(q, row.params, row.position))
        self._distributions[index].append(q)

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of target ids [rows, vocab]: ids that the draft vocabulary lacks cannot be drawn."""
        if self.vocabulary is None:
            return logits
        if self._full is None or len(self._full) != len(logits):
            self._full = logits.new_full((len(logits), self.vocab), float("-inf"))
        return self._full.index_copy_(1, self.vocabulary, logits)


def is_argmax(row: Row) -> bool:
    """Does the largest logit win, with nothing added to any?"""
    params = row.params
    return params.greedy and not params.penalised and not len(params.bias_ids) and row.allowed is None
