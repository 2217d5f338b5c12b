"""`choose`: the token plain decoding would emit, for every row of a pass.

Bias, suppression, grammar mask; repetition penalty (prompt and answer); presence and frequency (answer only);
temperature; top-k; top-p; min-p; then argmax(l + T·g) with keyed Gumbel noise g, or the plain argmax at temperature 0.
Ties go to the lower id, at a cut as well. A pure function of a row's logits and its `Row`.

Three bodies choose the same tokens, to the bit: `compiled` (numba, CPU), `device` (Triton, GPU) and `reference` (torch,
any device).
"""

import functools
from collections.abc import Sequence
from types import ModuleType

import torch

from forerun.kernels.portable import LARGEST_VOCABULARY
from forerun.sample import reference
from forerun.sample.row import Row


@functools.cache
def compiled_body() -> ModuleType | None:
    """The numba body, or None where numba is missing. Imported late: `--help` must not wait for a compiler."""
    try:
        from forerun.sample import compiled
    except ImportError:
        return None
    return compiled


@functools.cache
def device_body() -> ModuleType | None:
    """The Triton body, or None where triton is missing."""
    try:
        from forerun.sample import device
    except ImportError:
        return None
    return device


def _body(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> ModuleType:
    assert logits.ndim == 2 and len(logits) == len(rows), "one row of logits [R, V] per Row"
    assert 0 < vocab <= min(logits.shape[1], LARGEST_VOCABULARY)
    bodies = {"cpu": compiled_body, "cuda": device_body}
    body = bodies.get(logits.device.type, lambda: None)()
    return reference if body is None else body


def choose(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row of `logits` [R, V]; ids from `vocab` on are never chosen.

    Raises RowError (a ForerunError with the row's index) when a row has a NaN or no token left.
    """
    if not rows:
        return []
    tokens: list[int] = _body(logits, rows, vocab).choose(logits, rows, vocab)
    return tokens


def choose_row(logits: torch.Tensor, row: Row, vocab: int) -> int:
    """The slow twin for one row [V]: torch, a full sort, noise for every token."""
    return reference.choose(logits[None], [row], vocab)[0]


def probabilities(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """The exact distribution `choose` draws each row from, float64 [R, V]; one-hot at temperature 0."""
    if not rows:
        return torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    result: torch.Tensor = _body(logits, rows, vocab).probabilities(logits, rows, vocab)
    return result
