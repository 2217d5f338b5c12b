"""Bias, suppression, grammar mask and penalties: what changes logits before the temperature, on a handful of ids.

Each edit reads float32 logits, computes in float64 and rounds once, with basic arithmetic only: every body and device
gets the same bits. Work is proportional to the ids named, never to the vocabulary (a grammar mask aside).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forerun.sample.history import Ids
from forerun.sample.masks import flags_of
from forerun.sample.row import Row, check_best

Floats = npt.NDArray[np.float64]
MINUS_INFINITY = float("-inf")


@dataclass(slots=True)
class Edits:
    """A row's processors as arrays; all ids are below the vocabulary and distinct within an array."""

    bias_ids: Ids
    bias: Floats
    seen: Ids  # ids under the repetition penalty
    repetition: float
    answer_ids: Ids
    amounts: Floats  # presence + count · frequency, per answer id


def is_plain(row: Row) -> bool:
    """Whether the row's logits are used as they are."""
    return not row.params.needs_edits and row.allowed is None


def edits(row: Row, vocab: int) -> Edits:
    """What the row's processors change. Every row sees the exact history before it, drafted tokens included."""
    params = row.params
    nothing = np.empty(0, dtype=np.int64)
    seen = answer_ids = nothing
    amounts: Floats = np.empty(0, dtype=np.float64)
    if params.repetition_penalty != 1:
        seen = row.history.seen(row.drafted)
        seen = seen[(seen >= 0) & (seen < vocab)]
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        answer_ids, counts = row.history.answer(row.drafted)
        known = (answer_ids >= 0) & (answer_ids < vocab)
        answer_ids = answer_ids[known]
        amounts = counts[known].astype(np.float64) * params.frequency_penalty + params.presence_penalty
    named = int(np.searchsorted(params.bias_ids, vocab))  # sorted: those below the vocabulary come first
    return Edits(
        params.bias_ids[:named], params.bias_values[:named], seen, params.repetition_penalty, answer_ids, amounts
    )


def process_numpy(logits: npt.NDArray[np.float32], row: Row, index: int) -> npt.NDArray[np.float32]:
    """The processed logits [V] of one row. The input is not changed; it is returned when nothing applies."""
    if is_plain(row):
        return logits
    if not np.isfinite(top := logits.max()):  # before a mask could hide a NaN
        check_best(float(top), index)
    todo = edits(row, len(logits))
    work = logits.copy()
    with np.errstate(over="ignore"):  # an overflow to infinity is a value like any other; check_best sees it
        work[todo.bias_ids] = work[todo.bias_ids].astype(np.float64) + todo.bias
        if row.allowed is not None:
            np.copyto(work, MINUS_INFINITY, where=~flags_of(row.allowed, len(work)))
        old = work[todo.seen].astype(np.float64)
        work[todo.seen] = np.where(old > 0, old / todo.repetition, old * todo.repetition)
        work[todo.answer_ids] = work[todo.answer_ids].astype(np.float64) - todo.amounts
    return work


def process_torch(logits: torch.Tensor, row: Row) -> None:
    """The same on one row [V] of a float32 tensor, on any device and in place."""
    if is_plain(row):
        return
    todo = edits(row, len(logits))

    def here(array: npt.NDArray[np.int64] | Floats) -> torch.Tensor:
        return torch.from_numpy(array).to(logits.device)

    if len(todo.bias_ids):
        ids = here(todo.bias_ids)
        logits[ids] = (logits[ids].double() + here(todo.bias)).float()
    if row.allowed is not None:
        allowed = torch.from_numpy(flags_of(row.allowed, len(logits)))
        logits.masked_fill_(~allowed.to(logits.device), MINUS_INFINITY)
    if len(todo.seen):
        ids = here(todo.seen)
        old = logits[ids].double()
        # a tensor, because CUDA turns a division by a Python number into a product with its reciprocal
        penalty = torch.full_like(old, todo.repetition)
        logits[ids] = torch.where(old > 0, old / penalty, old * penalty).float()
    if len(todo.answer_ids):
        ids = here(todo.answer_ids)
        logits[ids] = (logits[ids].double() - here(todo.amounts)).float()
