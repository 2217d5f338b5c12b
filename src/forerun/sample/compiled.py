"""The CPU body of `choose`: numba kernels, one row at a time, the same tokens as `reference`.

Needs numba; `choose` imports it on first use. Rows are independent by construction, because each is computed alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forerun.sample import kernels
from forerun.sample.noise import split_seed
from forerun.sample.parameters import SamplingParams
from forerun.sample.processors import process_numpy
from forerun.sample.reference import min_p_offset
from forerun.sample.row import Row, check_best

FEW = 16  # below this share of the row, noise per survivor is cheaper than noise for the whole row


def _prepared(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[tuple[npt.NDArray[np.float32], int]]:
    """For each row its processed logits [vocab] and its best token."""
    lines = logits.detach().float().contiguous().numpy()
    prepared = []
    for index, row in enumerate(rows):
        line = process_numpy(lines[index, :vocab], row, index)
        best = int(line.argmax())  # the first of equals; a NaN comes before everything
        check_best(float(line[best]), index)
        prepared.append((line, best))
    return prepared


def _cut(line: npt.NDArray[np.float32], best: int, row: Row, scratch: npt.NDArray[np.int64]) -> tuple[np.float32, int]:
    """The last survivor of the filters: (logit, id)."""
    params = row.params
    offset = min_p_offset(params)
    cut, cut_id = kernels.cut_row(line, best, params.temperature, params.top_k, params.top_p, offset, scratch)
    return np.float32(cut), int(cut_id)


def _scratch(rows: Sequence[Row], vocab: int) -> npt.NDArray[np.int64]:
    """Room for candidates and their weights, where a row needs it: int64 [2, V]."""
    return np.empty((2, vocab if any(row.params.filtered for row in rows) else 1), dtype=np.int64)


def choose(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> list[int]:
    """The token of each row."""
    scratch = _scratch(rows, vocab)
    return [
        best if row.params.greedy else _sample(line, best, row, scratch)
        for row, (line, best) in zip(rows, _prepared(logits, rows, vocab), strict=True)
    ]


def _sample(line: npt.NDArray[np.float32], best: int, row: Row, scratch: npt.NDArray[np.int64]) -> int:
    """argmax(l + T·g) over the survivors."""
    params = row.params
    key = _key(params, row.position)
    cut, cut_id = np.float32(-np.inf), -1
    if params.filtered:
        cut, cut_id = _cut(line, best, row, scratch)
        count = int(kernels.gather(line, cut, cut_id, scratch[0]))
        if count < len(line) // FEW:
            return int(kernels.pick_some(line, scratch[0, :count], best, params.temperature, *key))
    return int(kernels.pick_any(line, best, params.temperature, cut, cut_id, *key))


def _key(params: SamplingParams, position: int) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Position, choice and the two words of the seed, typed for the kernels."""
    low, high = split_seed(params.seed)
    return np.uint64(position), np.uint64(params.choice), np.uint64(low), np.uint64(high)


def probabilities(logits: torch.Tensor, rows: Sequence[Row], vocab: int) -> torch.Tensor:
    """The distribution `choose` draws from, float64, zero beyond the vocabulary: same shape as `logits`."""
    scratch = _scratch(rows, vocab)
    result = np.zeros(logits.shape, dtype=np.float64)
    for out, row, (line, best) in zip(result, rows, _prepared(logits, rows, vocab), strict=True):
        if row.params.greedy:
            out[best] = 1.0
        else:
            cut, cut_id = _cut(line, best, row, scratch)
            kernels.spread(line, best, row.params.temperature, cut, cut_id, out[:vocab])
    return torch.from_numpy(result)


def draw(distribution: npt.NDArray[np.float64], params: SamplingParams, position: int, stream: int) -> int:
    """A token drawn from a distribution [V] with the keyed noise of `stream`."""
    return int(kernels.race(distribution, np.uint64(stream), *_key(params, position)))
