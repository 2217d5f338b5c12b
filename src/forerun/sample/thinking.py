"""Thinking before an answer: a budget that ends it exactly there, and output whose grammar begins behind it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from forerun.sample.constraint import Constraint
from forerun.sample.masks import Masks, Words, allows, everything, packed


class ThinkingMarks(NamedTuple):
    """The tokens that a model writes around its thinking."""

    start: tuple[int, ...] = ()  # none: it cannot begin to think by itself
    end: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()  # what is written to end it: `end`, perhaps with line breaks around it
    gap: tuple[int, ...] = ()  # what is written between `end` and constrained output


class Phase(Enum):
    """Where an answer is."""

    BEFORE = "before"  # it may begin to think, or answer at once
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkingState(NamedTuple):
    """All that a constraint on thinking knows of the tokens so far: following drafts changes nothing."""

    phase: Phase  # after `forced`
    matched: int = 0  # tokens of the start or end mark that just came
    spent: int = 0  # tokens of thinking
    forced: tuple[int, ...] = ()  # that must come next


class ThinkingConstraint:
    """A `Constraint` on the thinking of one answer, and on what follows it.

    After `budget` tokens of thinking the closing tokens must come. `output` is the constraint of the answer proper: it
    sees nothing of the thinking. Where it is given, no stop token may come before it.
    """

    def __init__(
        self,
        marks: ThinkingMarks,
        vocab: int,
        *,
        opened: bool,
        budget: int | None = None,
        output: Constraint | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`opened`: the prompt ends inside thinking. Else the model may begin, by `marks.start`."""
        assert marks.end, "thinking that never ends needs no constraint"
        self._marks, self._vocab, self._budget, self._output = marks, vocab, budget, output
        self._while_thinking: Words = everything(1, vocab)[0]
        if output is not None:
            self._while_thinking &= ~packed(stop_ids, vocab)
        # Where the output itself may begin like thinking, it does.
        self._may_start = bool(marks.start) and (output is None or not output.legal(marks.start[:1]))
        self._state = self._open(0) if opened else ThinkingState(Phase.BEFORE if self._may_start else Phase.ANSWER)

    def _open(self, spent: int, rest: tuple[int, ...] = ()) -> ThinkingState:
        """Thinking begins after these tokens; it may end there too."""
        if self._budget is not None and spent >= self._budget:
            return ThinkingState(Phase.ANSWER, 0, spent, rest + (self._marks.closing or self._marks.end))
        return ThinkingState(Phase.THINKING, 0, spent, rest)

    def _next(self, state: ThinkingState, token: int) -> ThinkingState:
        """After one more token, which is not one of the output's."""
        marks = self._marks
        if state.forced:
            return state._replace(forced=state.forced[1:])
        if state.phase is Phase.THINKING:
            matched, spent = advance(marks.end, state.matched, token), state.spent + 1
            gap = marks.gap if self._output is not None else ()
            if matched == len(marks.end):
                return ThinkingState(Phase.ANSWER, 0, spent, gap)
            if spent != self._budget:
                return ThinkingState(Phase.THINKING, matched, spent)
            closing = marks.end[matched:] + gap if matched else marks.closing or marks.end
            return ThinkingState(Phase.ANSWER, 0, spent, closing)
        if self._output is not None:
            return self._open(0, marks.start[1:])
        matched = advance(marks.start, state.matched, token)
        return self._open(state.spent) if matched and matched == len(marks.start) else state._replace(matched=matched)

    def _is_output(self, state: ThinkingState, token: int) -> bool:
        """Does this token belong to the constrained output?"""
        if self._output is None or state.forced or state.phase is Phase.THINKING:
            return False
        return state.phase is Phase.ANSWER or token != self._marks.start[0]

    def _walk(self, drafts: Sequence[int]) -> list[ThinkingState]:
        """The states before each draft that is no output, and the one after the last of them."""
        states = [self._state]
        for token in drafts:
            if self._is_output(states[-1], token):
                break
            states.append(self._next(states[-1], token))
        return states

    def _mask(self, state: ThinkingState) -> Words | None:
        """What may come next, where that is not all the output's affair."""
        if state.forced:
            return packed(state.forced[:1], self._vocab)
        if self._output is not None and state.phase is Phase.THINKING:
            return self._while_thinking
        return None

    def legal(self, drafts: Sequence[int]) -> int:
        """See `Constraint`."""
        states = self._walk(drafts)
        for index, (state, token) in enumerate(zip(states, drafts, strict=False)):
            mask = self._mask(state)
            if mask is not None and not allows(mask, token):
                return index
        before = len(states) - 1
        return before if self._output is None or before == len(drafts) else before + self._output.legal(drafts[before:])

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """See `Constraint`."""
        states = self._walk(drafts)
        rows = [self._mask(state) for state in states]
        if self._output is None:
            if all(row is None for row in rows):
                return None
            whole = everything(1, self._vocab)[0]
            return np.stack([whole if row is None else row for row in rows])
        found = everything(len(drafts) + 1, self._vocab)
        for index, (state, row) in enumerate(zip(states, rows, strict=True)):
            if row is not None:
                found[index] = row
            else:  # the output may begin here
                inner = self._output.masks(drafts[index:] if index == len(states) - 1 else [])
                if inner is not None:
                    found[index : index + len(inner)] = inner
                if state.phase is Phase.BEFORE:
                    found[index] |= packed(self._marks.start[:1], self._vocab)
        return found

    def forced(self, most: int) -> list[int]:
        """The marks, and the output's own behind them."""
        tokens = list(self._state.forced[:most])
        if self._state.phase is Phase.ANSWER and self._output is not None and len(tokens) < most:
            tokens += self._output.forced(most - len(tokens))
        return tokens

    def commit(self, token: int) -> None:
        """See `Constraint`."""
        state = self._state
        if self._is_output(state, token):
            assert self._output is not None
            self._output.commit(token)
            self._state = ThinkingState(Phase.ANSWER)
        else:
            self._state = self._next(state, token)


def advance(mark: tuple[int, ...], matched: int, token: int) -> int:
    """How much of a mark the text ends with after one more token, when before it ended with `matched` tokens of it.

    >>> advance((1, 1, 2), 2, 1)
    2
    """
    text = (*mark[:matched], token)
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if text[-size:] == mark[:size]), 0)
