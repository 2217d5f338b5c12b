"""The exactness probe: are a row's bits the same at every place in every pass this engine will run?

Ordinary random data hides a changed order of summation, so products are tried on rows with large cancelling pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.cache.recurrent import RECORDED
from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Target, make_pass

HUGE = 2.0**18  # pairs of +HUGE and −HUGE cancel exactly only in one order of summation


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """For each width: are all rows bit-equal to the same rows computed alone?"""

    widths: tuple[tuple[int, bool], ...]

    @property
    def guaranteed(self) -> bool:
        return all(same for _, same in self.widths)

    @property
    def widest(self) -> int:
        """The widest pass up to which every width keeps bits; 1 = plain decoding only."""
        best = 1
        for width, same in self.widths:
            if not same:
                return best
            best = width
        return best


def cancelling_rows(rows: int, width: int, seed: int = 0) -> Tensor:
    """[rows, width] of ordinary values with huge cancelling pairs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    for row in x:
        places = torch.randperm(width, generator=generator)[: width // 4 * 2]
        signs = torch.ones(len(places))
        signs[1::2] = -1
        row[places] = HUGE * signs
    return x


def product_keeps_bits(kernels: Kernels, matrix: Matrix, width: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Every row of a product of `width` rows against the same row alone."""
    x = cancelling_rows(width, matrix.shape[1]).to(device, dtype)
    together = kernels.linear(x, matrix, prefill=False)
    return all(torch.equal(kernels.linear(x[r : r + 1], matrix, prefill=False)[0], together[r]) for r in range(width))


def probe(model: Decoder, pool: PagePool, widths: list[int], target: Target | None = None) -> ProbeResult:
    """Try every width in `widths`, products on cancelling pairs first and then the whole model as `target` runs it."""
    kernels, widths, results = model.kernels, sorted(widths), []
    matrices = list({matrix.shape: matrix for matrix in model.matrices()}.values())
    cache, neighbour = SequenceCache(pool), SequenceCache(pool)
    try:
        walk = Walk(target or model, model.config.vocab, cache, neighbour, rows=widths[-1])
        for width in widths:
            same = all(product_keeps_bits(kernels, m, width, model.device, model.dtype) for m in matrices)
            results.append((width, same and walk.keeps_bits(width)))
    finally:
        cache.release()
        neighbour.release()
    return ProbeResult(tuple(results))


class Walk:
    """A sequence that goes one token at a time over the border of a page, and again in wide passes beside another."""

    def __init__(self, model: Target, vocab: int, cache: SequenceCache, neighbour: SequenceCache, rows: int) -> None:
        self.model, self.cache, self.neighbour = model, cache, neighbour
        self.start = max(1, cache.pool.page - rows // 2)
        self.tokens = [(31 * n + 5) % vocab for n in range(self.start + rows)]
        cache.grow(len(self.tokens))
        neighbour.grow(rows + 3)
        for start in range(0, self.start, RECORDED):  # as many rows as a decode pass may have
            step(model, [cache], [self.tokens[start : min(start + RECORDED, self.start)]])
        step(model, [neighbour], [[7 % vocab] * 3])
        self.marks = cache.snapshot(), neighbour.snapshot()
        self.alone = torch.cat([step(model, [cache], [[token]]).clone() for token in self.tokens[self.start :]])

    def keeps_bits(self, width: int) -> bool:
        """Rows of one wide pass against the same rows one by one; lengths in the pass are mixed, places vary."""
        for cache, mark in zip((self.cache, self.neighbour), self.marks, strict=True):
            cache.restore(mark)
        mine = self.tokens[self.start : self.start + width]
        other = [token // 2 for token in mine]
        keep = width // 2  # rows that count: the rest must leave no trace
        if width % 2:
            logits = step(self.model, [self.neighbour, self.cache], [other, mine], keep)[width:]
        else:
            logits = step(self.model, [self.cache, self.neighbour], [mine, other], keep)[:width]
        return torch.equal(logits, self.alone[:width]) and self._goes_on(keep)

    def _goes_on(self, kept: int) -> bool:
        """Does the row after `kept` rows of a wide pass come out as it did alone? Only state has to be rolled back."""
        if self.cache.pool.states is None:
            return True
        place = self.start + kept
        return torch.equal(step(self.model, [self.cache], [self.tokens[place : place + 1]])[0], self.alone[kept])


def step(model: Target, caches: list[SequenceCache], tokens: list[list[int]], keep: int | None = None) -> Tensor:
    """One decode pass, logits of all its rows; `keep` of each sequence's rows are committed, or all."""
    work = list(zip(caches, tokens, strict=True))
    logits = model.forward(make_pass(work, last_only=False)).logits
    for cache, mine in work:
        cache.commit(len(mine) if keep is None else keep)
    return logits
