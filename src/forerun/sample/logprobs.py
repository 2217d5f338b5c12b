"""How likely the target itself finds a token: the log of the softmax of its logits as they are.

Nothing that a request asks for changes them: no bias, penalty, temperature or mask. A row is summed by itself, in
double precision and in an order that its length alone decides. So the bits depend on the row alone: not on its pass,
its width or its neighbours.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from forerun.errors import ForerunError

MOST_LIKELY = 20  # tokens that a request may ask for beside the one that was chosen
LEAST = -9999.0  # what is never said; JSON has no infinity

Logits = npt.NDArray[np.float32]


def log_probabilities(logits: Logits, token: int, top: int, vocab: int) -> tuple[float, list[tuple[int, float]]]:
    """Of `token`, and of the `top` likeliest tokens below `vocab`, by the row `logits` [V]; ties by the lower id.

    >>> log_probabilities(np.zeros(4, dtype=np.float32), 2, top=1, vocab=4)[1][0][0]
    0
    """
    best = float(logits.max())
    base = best + math.log(float(np.exp(logits.astype(np.float64) - best).sum())) if math.isfinite(best) else math.nan
    if not math.isfinite(base):
        raise ForerunError("the model gave a logit that is infinite or not a number: try --dtype float32")
    likeliest = likeliest_tokens(logits[:vocab], top)
    return _difference(logits, token, base), [(one, _difference(logits, one, base)) for one in likeliest]


def likeliest_tokens(logits: Logits, count: int) -> list[int]:
    """The ids of the greatest logits, the greatest first."""
    count = min(count, len(logits))
    if not count:
        return []
    least = np.partition(logits, -count)[-count]
    found = np.flatnonzero(logits >= least)  # ascending; more than `count` where several are equal to the least
    order = np.argsort(-logits[found], kind="stable")
    return [int(one) for one in found[order][:count]]


def _difference(logits: Logits, token: int, base: float) -> float:
    return max(LEAST, float(logits[token]) - base)
