"""Log probabilities of tokens that were emitted, and of a prompt's own, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.engine.sequence import Logprob
from forerun.models.layers.rows import Target
from forerun.sample.logprobs import log_probabilities

ROWS = 16  # of a prompt whose logits are there at once: as many as a round may have, whose bits were probed


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int, vocab: int) -> list[Logprob]:
    """Of one token for each of the first rows of `logits` [rows, V]."""
    rows = logits[: len(tokens)].float().cpu().numpy()
    return [Logprob(*log_probabilities(row, token, top, vocab)) for row, token in zip(rows, tokens, strict=True)]


def prompt_logprobs(target: Target, features: Tensor, tokens: Sequence[int], top: int, vocab: int) -> list[Logprob]:
    """Of the token after each of the first rows with these features [rows, …]; the logits of a few at a time."""
    found: list[Logprob] = []
    for start in range(0, len(tokens), ROWS):
        some = tokens[start : start + ROWS]
        found += logprobs_of(target.logits(features[start : start + len(some)]), some, top, vocab)
    return found
