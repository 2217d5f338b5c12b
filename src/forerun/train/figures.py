"""The figures of a finished head: which prompts, which temperatures, which draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forerun.progress import Progress
from forerun.train.evaluate import (
    PROMPTS_AT_ONCE,
    VOCABULARIES,
    Measured,
    choose_vocabulary,
    evaluate,
    table,
    tokens_per_round,
)
from forerun.train.head import Head
from forerun.train.prompts.questions import Question

SAMPLED = 0.8
SEED = 0  # the same for every head, so that all are measured on the same answers


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its ids."""

    question: Question
    ids: list[int]


def measure(
    head: Head,
    asked: Sequence[Asked],
    ends: frozenset[int],
    order: Tensor,
    size: int | None,
    tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Tables of every collection at temperature 0 and above, and which draft vocabulary to take.

    A draft vocabulary is a beginning of `order`; its size may be given.
    """
    full = head.config.vocab
    sizes = [one for one in VOCABULARIES if one < full]
    if size is not None:
        sizes = sorted({*sizes, size} - {full})
    wanted = list(dict.fromkeys([*sizes, full]))
    groups = _groups(asked)
    measured: dict[str, dict[tuple[str, bool], list[Measured]]] = {"greedy": {}, "sampled": {}}
    with progress.task("evaluating", 2 * len(groups)) as task:
        for name, heat in (("greedy", 0.0), ("sampled", SAMPLED)):
            for group, some in groups.items():
                measured[name][group] = _evaluated(head, some, ends, order, wanted, heat, tokens)
                task.advance()
    every = [one for found in measured["greedy"].values() for one in found]
    chosen, rates = choose_vocabulary(every, full, sizes)
    size = chosen if size is None else size
    return {
        "evaluation": {
            collection: {name: _tables(found, collection, size) for name, found in measured.items()}
            for collection in dict.fromkeys(name for name, _ in groups)
        },
        "draft_vocab": {"size": size, "tokens_per_round": rates},
    }


def _evaluated(
    head: Head,
    asked: Sequence[Asked],
    ends: frozenset[int],
    order: Tensor,
    sizes: Sequence[int],
    heat: float,
    tokens: int,
) -> list[Measured]:
    """So many at once that the memory of a GPU holds the head's outputs for all of them."""
    found: list[Measured] = []
    for start in range(0, len(asked), PROMPTS_AT_ONCE):
        some = [(one.question.category, one.ids) for one in asked[start : start + PROMPTS_AT_ONCE]]
        found += evaluate(head, some, ends, order, sizes, temperature=heat, tokens=tokens, seed=SEED + start)
    return found


def _groups(asked: Sequence[Asked]) -> dict[tuple[str, bool], list[Asked]]:
    """By collection, short prompts apart from long ones: a batch is as wide as its longest prompt."""
    groups: dict[tuple[str, bool], list[Asked]] = {}
    for one in asked:
        groups.setdefault((one.question.collection, one.question.long), []).append(one)
    return groups


def _tables(found: dict[tuple[str, bool], list[Measured]], collection: str, size: int) -> dict[str, Any]:
    short, long = (found.get((collection, is_long), []) for is_long in (False, True))
    tables = table([*short, *long], size)
    if short and long:
        tables["by_length"] = {"short": table(short, size)["all"], "long": table(long, size)["all"]}
    return tables


def rate_with_ids(
    head: Head, asked: Sequence[Asked], ends: frozenset[int], order: Tensor, size: int, tokens: int
) -> float:
    """Greedy tokens per round at depth 4 with another draft vocabulary: the first ids of `order`."""
    accepted = []
    for some in _groups(asked).values():
        accepted += [one.accepted[size] for one in _evaluated(head, some, ends, order, [size], 0.0, tokens)]
    return round(tokens_per_round(accepted, 4), 4)
