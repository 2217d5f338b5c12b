"""How drafts are checked: `coupled` (same tokens as plain decoding) and `rejection` (same distribution)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forerun.sample import noise
from forerun.sample.choose import compiled_body
from forerun.sample.parameters import SamplingParams

Distribution = npt.NDArray[np.float64]


def accept_coupled(chosen: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """(drafts accepted, token that ends the round). `chosen` holds what `choose` gave for the k + 1 rows.

    >>> accept_coupled([5, 6, 7], [5, 9])
    (1, 6)
    """
    assert len(chosen) == len(drafts) + 1
    accepted = 0
    while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
        accepted += 1
    return accepted, chosen[accepted]


def draw(probabilities: torch.Tensor, params: SamplingParams, position: int, stream: int = noise.DRAFT) -> int:
    """A token drawn from a distribution [V] (its sum does not matter) with the keyed noise of `stream`."""
    return _draw(_numpy(probabilities), params, position, stream)


def accept_rejection(
    p: torch.Tensor,
    drafts: Sequence[int],
    q: torch.Tensor | None,
    params: SamplingParams,
    first_position: int,
) -> tuple[int, int]:
    """(drafts accepted, token that ends the round), so that the text is distributed as plain decoding's.

    `p` [k + 1, V] are the target's probabilities of the rows, `q` [k, V] those the drafts were drawn from, by `draw`
    with its default stream; None for deterministic drafts (q one-hot). `first_position` is the absolute index of the
    first draft. How many drafts to check must be decided before they are drawn, else the result is biased.
    """
    assert len(p) == len(drafts) + 1 and (q is None or len(q) == len(drafts))
    for j, draft in enumerate(drafts):
        position = first_position + j
        q_draft = 1.0 if q is None else float(q[j, draft])
        known = q is not None and 0 < q_draft < np.inf  # a draft that q calls impossible was not drawn from q: one-hot
        coin = noise.uniform(params.seed, params.choice, position, noise.ACCEPT)
        if coin * (q_draft if known else 1.0) < float(p[j, draft]):  # coin < p / q
            continue
        residual = _residual(_numpy(p[j]), _numpy(q[j]) if known and q is not None else None, draft)
        return j, _draw(residual, params, position, noise.RESIDUAL)
    return len(drafts), _draw(_numpy(p[len(drafts)]), params, first_position + len(drafts), noise.RESIDUAL)


def _residual(p: Distribution, q: Distribution | None, draft: int) -> Distribution:
    """max(0, p − q), not normalised: what a rejected position is drawn from. q None is one-hot at the draft."""
    if q is None:
        rest = p.copy()
        rest[draft] = 0.0
    else:
        rest = np.maximum(p - q, 0.0)
    # p = q up to rounding leaves nothing; then the rejection itself was a rounding error, and p is right
    return rest if rest.max() > 0 else p


def _numpy(distribution: torch.Tensor) -> Distribution:
    result: Distribution = distribution.detach().to("cpu", torch.float64).contiguous().numpy()
    return result


def _draw(distribution: Distribution, params: SamplingParams, position: int, stream: int) -> int:
    """The winner of an exponential race: argmin(E / p) has the distribution p, as argmax(log p + gumbel) has."""
    compiled = compiled_body()
    if compiled is not None:
        token: int = compiled.draw(distribution, params, position, stream)
        return token
    ids = np.flatnonzero(distribution > 0)
    race = noise.exponential(params.seed, params.choice, position, ids, stream) / distribution[ids]
    return int(ids[race.argmin()])
