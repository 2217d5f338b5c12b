"""The figures of a finished head: which prompts, which temperatures, which draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from forerun.progress import Progress
from forerun.train.evaluate import VOCABULARIES, choose_vocabulary, evaluate, table, tokens_per_round
from forerun.train.head import Head

SAMPLED = 0.8
SEED = 0  # the same for every head, so that all are measured on the same answers


def measure(
    head: Head,
    prompts: Sequence[tuple[str, list[int]]],
    ends: frozenset[int],
    order: Tensor,
    size: int | None,
    tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Tables at temperature 0 and above. A draft vocabulary is a beginning of `order`; its size may be given."""
    full = head.config.vocab
    sizes = [one for one in VOCABULARIES if one < full]
    if size is not None:
        sizes = sorted({*sizes, size} - {full})
    asked = dict.fromkeys([*sizes, full])
    measured = {}
    with progress.task("evaluating", 2) as task:
        for name, heat in (("greedy", 0.0), ("sampled", SAMPLED)):
            measured[name] = evaluate(
                head, prompts, ends, order, list(asked), temperature=heat, tokens=tokens, seed=SEED,
            )  # fmt: skip
            task.advance()
    chosen, rates = choose_vocabulary(measured["greedy"], full, sizes)
    size = chosen if size is None else size
    tables = {name: table(found, size) for name, found in measured.items()}
    return tables | {"draft_vocab": {"size": size, "tokens_per_round": rates}}


def rate_with_ids(
    head: Head, prompts: Sequence[tuple[str, list[int]]], ends: frozenset[int], order: Tensor, size: int, tokens: int
) -> float:
    """Greedy tokens per round at depth 4 with another draft vocabulary: the first ids of `order`."""
    found = evaluate(head, prompts, ends, order, [size], temperature=0.0, tokens=tokens, seed=SEED)
    return round(tokens_per_round([one.accepted[size] for one in found], 4), 4)
