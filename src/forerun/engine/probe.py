"""The exactness probe: are a row's bits the same at every place in every pass this engine will run?

Ordinary random data hides a changed order of summation, so products are tried on rows with large cancelling pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.interface import Activation, Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Target, make_pass

DIFFERENT = 17  # rows: no power of 2, so that each comes to every place in a tile
HUGE = 2.0**18  # pairs of +HUGE and −HUGE cancel exactly only in one order of summation
SHRUNK = 2.0**13  # by which rows are divided in float16, which ends at 65504: infinities would tell nothing


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


class ProductProbe:
    """One product: every row of it against the same row alone. Many rows are a few again and again."""

    def __init__(
        self,
        kernels: Kernels,
        matrix: Matrix,
        device: torch.device,
        dtype: torch.dtype,
        activation: Activation | None = None,
    ) -> None:
        """`activation`: of a matrix that goes through `gated_linear`."""
        gated = partial(kernels.gated_linear, activation=activation or "silu")
        self._run, self._matrix = kernels.linear if activation is None else gated, matrix
        x = cancelling_rows(DIFFERENT, matrix.shape[1])
        self._x = (x / SHRUNK if dtype == torch.float16 else x).to(device, dtype)
        self._alone = torch.cat([self._run(row, matrix) for row in self._x.split(1)])

    def keeps_bits(self, rows: int) -> bool:
        again = torch.arange(rows, device=self._x.device) % DIFFERENT
        together = self._run(self._x[again], self._matrix)
        return torch.equal(together, self._alone[again])


class RowCounts:
    """Numbers of rows in a pass and whether all products of a model keep bits there; each is tried once.

    On a GPU products are the only operation that takes other code when a pass has more rows.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._probes: list[ProductProbe] = []  # made when the first question comes
        self._found: dict[int, bool] = {}

    def keep_bits(self, rows: int) -> bool:
        """All products, in a pass of so many rows."""
        if rows not in self._found:
            if not self._probes:
                model = self._model
                self._probes = [
                    ProductProbe(model.kernels, matrix, model.device, model.dtype, activation)
                    for matrix, activation in model.products()
                ]
            self._found[rows] = all(probe.keeps_bits(rows) for probe in self._probes)
        return self._found[rows]


def probe(
    model: Decoder,
    pool: PagePool,
    widths: list[int],
    target: Target | None = None,
    counts: RowCounts | None = None,
) -> ProbeResult:
    """Try every width in `widths`, products on cancelling pairs first and then the whole model as `target` runs it."""
    widths, results, products = sorted(widths), [], counts or RowCounts(model)
    cache, neighbour = SequenceCache(pool), SequenceCache(pool)
    try:
        walk = Walk(target or model, model.config.vocab, cache, neighbour, rows=widths[-1])
        for width in widths:
            results.append((width, products.keep_bits(width) and walk.keeps_bits(width)))
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
        model.forward(make_pass([(cache, self.tokens[: self.start])], last_only=True, prompt=True))
        cache.commit(self.start)
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
