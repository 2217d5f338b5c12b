"""Every row of every batch and width against the same row alone, bit by bit: what the tests of GPU exactness share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.models.layers.rows import Target, make_pass

TOKENS = 250  # that texts are made of: any vocabulary has them


def check_row_bits(
    target: Target, pool: PagePool, lengths: tuple[int, int], batches: Sequence[int], widths: Sequence[int]
) -> None:
    """Two texts of the given lengths take turns in the places of a batch; each is gone on with one row at a time first.

    The pool has room for the largest batch and one more.
    """
    texts = [[(step * n + 11) % TOKENS for n in range(length)] for step, length in zip((37, 91), lengths, strict=True)]
    rows = [[(13 * n + 5) % TOKENS for n in range(max(widths))], [(17 * n + 9) % TOKENS for n in range(max(widths))]]

    def start(kind: int) -> SequenceCache:
        cache = SequenceCache(pool)
        cache.grow(len(texts[kind]) + max(widths))
        target.forward(make_pass([(cache, texts[kind])], last_only=True, prompt=True))
        cache.commit(len(texts[kind]))
        return cache

    def one_by_one(kind: int) -> Tensor:
        cache, logits = start(kind), []
        for token in rows[kind]:
            logits.append(target.forward(make_pass([(cache, [token])], last_only=False)).logits.clone())
            cache.commit(1)
        cache.release()
        return torch.cat(logits)

    alone = [one_by_one(0), one_by_one(1)]
    assert all(bool(logits.isfinite().all()) for logits in alone) and not torch.equal(*alone)
    caches = [start(n % 2) for n in range(max(batches))]
    for batch in batches:
        for width in widths:
            work = [(cache, rows[n % 2][:width]) for n, cache in enumerate(caches[:batch])]
            logits = target.forward(make_pass(work, last_only=False)).logits.view(batch, width, -1)
            for cache in caches[:batch]:
                cache.commit(0)
            for place in range(batch):
                same = logits[place] == alone[place % 2][:width]
                assert bool(same.all()), f"batch {batch}, width {width}, place {place}: {int((~same).sum())} differ"
    for cache in caches:
        cache.release()
