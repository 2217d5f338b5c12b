"""The constraint of one answer, out of all that a request asks for."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import ForerunError
from forerun.sample.constraint import Constraint
from forerun.sample.grammar import Grammar
from forerun.sample.limits import Both, MinTokens
from forerun.sample.thinking import ThinkingConstraint, ThinkingMarks


def build_constraint(
    vocab: int,
    stop_ids: frozenset[int],
    *,
    grammar: Grammar | None = None,
    thinking_open: bool = False,
    think_start_ids: Sequence[int] = (),
    think_end_ids: Sequence[int] = (),
    closing_ids: Sequence[int] = (),
    gap_ids: Sequence[int] = (),
    budget: int | None = None,
    min_tokens: int = 0,
) -> Constraint | None:
    """None where anything may come. Every answer needs one of its own; a compiled grammar may be shared.

    `vocab` is the engine's, `stop_ids` the request's. `thinking_open`: the prompt ends inside thinking; else the model
    may begin by `think_start_ids` (none: it must not, or does not think). Thinking ends with `think_end_ids`; after
    `budget` tokens of it `closing_ids` are written (none: the end itself). `gap_ids` come between thinking that ended
    by itself and an answer with a grammar.
    """
    if budget is not None and budget < 0:
        raise ForerunError(f"the thinking budget must be at least 0 tokens, not {budget}")
    if min_tokens < 0:
        raise ForerunError(f"min tokens must be at least 0, not {min_tokens}")
    if budget is not None and not think_end_ids:
        raise ForerunError("this model does not mark where its thinking ends: leave the thinking budget out")
    found: Constraint | None = None if grammar is None else grammar.start(stop_ids)
    may_think = bool(think_end_ids) and (thinking_open or bool(think_start_ids))
    if may_think and (grammar is not None or budget is not None):
        marks = ThinkingMarks(tuple(think_start_ids), tuple(think_end_ids), tuple(closing_ids), tuple(gap_ids))
        found = ThinkingConstraint(marks, vocab, opened=thinking_open, budget=budget, output=found, stop_ids=stop_ids)
    if min_tokens and stop_ids:
        least = MinTokens(min_tokens, stop_ids, vocab)
        found = least if found is None else Both(found, least)
    return found
