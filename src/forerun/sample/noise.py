"""Keyed randomness: noise is a pure function of (seed, choice, position, token id, stream), with no generator state.

Philox4x32-10 with counter (token id // 4, position, choice, stream) and the 64-bit seed as key; a token takes word
token id % 4. So the noise of a token does not depend on order, batch, width, or a reduced draft vocabulary.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun.kernels import portable

# Separate streams, because a draft drawn with the noise that later redraws its position would bias the result.
CHOOSE = portable.CHOOSE
DRAFT = 1  # drafts sampled for `rejection`
ACCEPT = 2  # the coin of `rejection`
RESIDUAL = 3  # the redraw of `rejection`


def split_seed(seed: int) -> tuple[int, int]:
    """The two 32-bit words of the key, low word first."""
    return seed & portable.MASK32, seed >> 32


def words(seed: int, choice: int, position: int, ids: npt.NDArray[np.int64], stream: int) -> npt.NDArray[np.int64]:
    """The 32-bit words of the given token ids [n], as int64."""
    low, high = split_seed(seed)
    counter = (ids >> 2, np.full_like(ids, position), np.full_like(ids, choice), np.full_like(ids, stream))
    four = np.stack(portable.philox(*counter, low, high))  # [4, n]
    chosen: npt.NDArray[np.int64] = np.take_along_axis(four, (ids & 3)[None], axis=0)[0]
    return chosen


def gumbel(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.int64], stream: int = CHOOSE
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of the given token ids [n]."""
    noise: npt.NDArray[np.float64] = portable.gumbel(words(seed, choice, position, ids, stream), np)
    return noise


def exponential(
    seed: int, choice: int, position: int, ids: npt.NDArray[np.int64], stream: int = CHOOSE
) -> npt.NDArray[np.float64]:
    """Standard exponential noise −log u of the given token ids [n]; its −log is `gumbel`."""
    noise: npt.NDArray[np.float64] = portable.exponential(words(seed, choice, position, ids, stream), np)
    return noise


def uniform(seed: int, choice: int, position: int, stream: int = ACCEPT) -> float:
    """One number in (0, 1), never an end: the coin of a position."""
    word = portable.philox(0, position, choice, stream, *split_seed(seed))[0]
    return (int(word) + 0.5) * 2.0**-32


def gumbel_rows(
    seeds: list[int], choices: list[int], positions: list[int], vocab: int, device: torch.device
) -> torch.Tensor:
    """Gumbel noise of stream CHOOSE for all ids of many rows, float64 [R, vocab], on any device."""

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)[:, None]

    blocks = torch.arange((vocab + 3) // 4, dtype=torch.int64, device=device)[None]
    keys = [split_seed(seed) for seed in seeds]
    four: tuple[Any, ...] = portable.philox(
        blocks.expand(len(seeds), -1),
        column(positions),
        column(choices),
        torch.full_like(blocks, CHOOSE),
        column([low for low, _ in keys]),
        column([high for _, high in keys]),
    )
    raw = torch.stack(four, dim=-1).flatten(1)[:, :vocab]
    noise: torch.Tensor = portable.gumbel(raw.contiguous(), torch)
    return noise
