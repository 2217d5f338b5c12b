"""Masks of tokens as words of 32 bits, the layout of llguidance: bit t % 32 of word t // 32 belongs to token t."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

WORD = 32  # tokens of one word
Words = npt.NDArray[np.int32]  # [⌈vocab / 32⌉], the mask of one row
Masks = npt.NDArray[np.int32]  # [rows, ⌈vocab / 32⌉]


def words_of(vocab: int) -> int:
    """Words of a mask.

    >>> words_of(33)
    2
    """
    return -(-vocab // WORD)


def packed(ids: Iterable[int], vocab: int) -> Words:
    """A mask that allows these tokens and no others; ids beyond the vocabulary are left out."""
    flags = np.zeros(words_of(vocab) * WORD, dtype=np.uint8)
    flags[[token for token in ids if 0 <= token < vocab]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def flags_of(words: Words, vocab: int) -> npt.NDArray[np.bool_]:
    """Whether each token is allowed [vocab]."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=vocab, bitorder="little")
    return bits.view(np.bool_)


def allows(words: Words, token: int) -> bool:
    """Is this one token allowed?"""
    return 0 <= token < len(words) * WORD and bool(int(words[token // WORD]) >> (token % WORD) & 1)


def everything(rows: int, vocab: int) -> Masks:
    """Masks that rule nothing out; bits beyond the vocabulary are not set."""
    masks = np.full((rows, words_of(vocab)), -1, dtype=np.int32)
    if vocab % WORD:
        masks[:, -1] = (1 << vocab % WORD) - 1
    return masks
