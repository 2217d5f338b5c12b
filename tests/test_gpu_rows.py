"""A row's bits on a GPU do not depend on the pass that it is in: a prompt whole, in pieces and one by one, alone and
beside others, as rows of a prompt and as generated ones, in a pass that is padded or not.

Logits of every row are compared, through the model. Real shapes need a GPU; tiny ones run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import DEVICE, PAGE, SLOW, tiny_folder, tiny_hybrid
from tiny_gemma import FULL, SLIDING, random_gemma, save_gemma
from torch import Tensor

from forerun.bench.random_model import SHAPES, RandomCheckpoint
from forerun.cache.pages import PagePool, SequenceCache
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.interface import CHUNK_ROWS, RowTables
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Part, Pass, rows_of
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

# Rows that belong to no sequence may overflow; the interpreter says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)")
Rows = tuple[SequenceCache, list[int], bool]  # tokens that go on in a cache; of a prompt?


def text(length: int, step: int = 37) -> list[int]:
    return [(step * n + n * n + 11) % 250 for n in range(length)]


def logits_of(model: Decoder, work: Sequence[Rows], keep: bool = True, padded: int = 0) -> list[Tensor]:
    """One pass, generated rows first: logits of the rows of each. `padded`: to so many rows."""
    pool = work[0][0].pool
    parts = [Part(cache, cache.length, len(tokens), prompt) for cache, tokens, prompt in work]
    for part in parts:
        part.cache.begin(part.count, part.prompt)
    rows = rows_of(parts)
    rows.states = () if pool.states is None else pool.states.layers
    tokens = [token for _, mine, _ in work for token in mine]
    count = len(tokens)
    if padded:  # one more line, whose pages are all spare
        owners = [(n, part.start, part.count) for n, part in enumerate(parts)]
        turns = [mine for mine, part in zip(owners, parts, strict=True) if not part.prompt]
        entries = len(turns) + 1, padded // CHUNK_ROWS + len(parts), len(parts) + 1
        rows.tables = RowTables.of(turns, owners[len(turns) :], DEVICE, padded, len(parts), entries)
        rows.block_tables = [torch.cat([t, torch.full_like(t[:1], pool.spare_page)]) for t in rows.block_tables]
        rows.slot = torch.cat([rows.slot, torch.full_like(rows.slot[:1], pool.spare_slot)])
        tokens += [0] * (padded - count)
    wanted = torch.arange(count, device=DEVICE)
    found = model.forward(Pass(torch.tensor(tokens, device=DEVICE), rows, pool.layers, wanted)).logits
    for part in parts:
        part.cache.commit(part.count if keep else 0)
    return [logits.clone() for logits in found.split([part.count for part in parts])]


class Reader:
    """Reads one text in many ways."""

    def __init__(self, model: Decoder, pool: PagePool, length: int) -> None:
        self.model, self.pool, self.tokens = model, pool, text(length)
        self.whole = self.read([length])

    def cache(self, length: int) -> SequenceCache:
        cache = SequenceCache(self.pool)
        cache.grow(length)
        return cache

    def read(self, pieces: Sequence[int], prompt: bool = True, padded: int = 0) -> Tensor:
        """Logits of every row, read in these pieces."""
        cache, found = self.cache(len(self.tokens)), []
        for piece in pieces:
            tokens = self.tokens[cache.length : cache.length + piece]
            found += logits_of(self.model, [(cache, tokens, prompt)], padded=padded)
        cache.release()
        return torch.cat(found)

    def answered(self, width: int, read: int) -> Tensor:
        """The first `read` tokens as a prompt, then generated rows, so many in a pass."""
        cache = self.cache(len(self.tokens))
        found = logits_of(self.model, [(cache, self.tokens[:read], True)])
        while cache.length < len(self.tokens):
            tokens = self.tokens[cache.length : cache.length + width]
            found += logits_of(self.model, [(cache, tokens, False)])
        cache.release()
        return torch.cat(found)

    def in_company(self, pieces: Sequence[int], generating: int, reading: int, size: int) -> Tensor:
        """In these pieces, beside sequences that generate and other prompts, of `size` tokens, before and behind it."""
        cache, found = self.cache(len(self.tokens)), []
        running = [self.cache(3 + n % 9 + 2 * len(pieces)) for n in range(generating)]
        for n, one in enumerate(running):
            logits_of(self.model, [(one, text(3 + n % 9, 51 + n), True)])
        for piece in pieces:
            others = [self.cache(size) for _ in range(reading)]
            tokens = self.tokens[cache.length : cache.length + piece]
            work: list[Rows] = [(one, [5 + n, 9][: 1 + n % 2], False) for n, one in enumerate(running)]
            prompts: list[Rows] = [(one, text(size, 91 + n), True) for n, one in enumerate(others)]
            prompts.insert(reading // 2, (cache, tokens, True))
            mine = generating + reading // 2
            found.append(logits_of(self.model, [*work, *prompts])[mine])
            for one in others:
                one.release()
        for one in (cache, *running):
            one.release()
        return torch.cat(found)

    def check(self, found: Tensor, how: str, but: int = 0) -> None:
        """The same bits in every row, except the first so many."""
        same = (found == self.whole).all(dim=1)[but:]
        assert bool(same.all()), f"{how}: rows {(~same).nonzero()[:, 0].tolist()[:20]} differ"


def in_pieces(length: int, piece: int) -> list[int]:
    return [min(piece, length - start) for start in range(0, length, piece)]


def check_model(model: Decoder, pool: PagePool, length: int, sizes: Sequence[int], crowds: Sequence[int]) -> None:
    reader = Reader(model, pool, length)
    assert bool(reader.whole.isfinite().all())
    hybrid = pool.states is not None
    for size in sizes:
        if not hybrid or size % CHUNK_ROWS == 0:  # recurrences are cut at these borders alone
            reader.check(reader.read(in_pieces(length, size)), f"pieces of {size}")
    reader.check(reader.read([length], padded=length + 9), "padded")
    most = CHUNK_ROWS if hybrid else next(size for size in reversed(sizes) if size <= length // 2)
    for crowd in crowds:
        found = reader.in_company(in_pieces(length, most), crowd, min(crowd, 5), 7)
        reader.check(found, f"beside {crowd} others")
    if not hybrid:  # a recurrence has another form for generated rows
        start = length - 2 * sizes[0] - 5
        for width in (1, 3):
            reader.check(reader.answered(width, start), f"generated, {width} rows in a pass")
    pool.check([])


def model_of(source: Any, dtype: torch.dtype) -> Decoder:
    model = build(source, CudaKernels(DEVICE), DEVICE, dtype, NullProgress())
    model.rope.reserve(2048)
    return model


def pool_of(model: Decoder, dtype: torch.dtype, pages: int, page: int) -> PagePool:
    return PagePool.for_model(model.config, pages, page, dtype, DEVICE, slots=80, on_device=True)


def gemma(folder: Path) -> Path:
    few = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 20, "vocab_size": 290}
    return save_gemma(folder, random_gemma("26B-A4B", **few))


TINY: dict[str, Callable[[Path], Path]] = {"llama": tiny_folder, "hybrid": tiny_hybrid, "gemma": gemma}


@pytest.mark.kernels
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "hybrid", pytest.param("gemma", marks=SLOW)])
def test_tiny_models(kind: str, tmp_path: Path, fewer_programs: None) -> None:
    model = model_of(open_checkpoint(TINY[kind](tmp_path)), torch.float32)
    check_model(model, pool_of(model, torch.float32, 80, PAGE), 70, (7, 64), (2,))


# A few layers of each kind: the shapes of all products, and the whole vocabulary.
SHARING = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
REAL: dict[str, dict[str, Any]] = {
    "Llama-8B": {"num_hidden_layers": 2},
    "Qwen3.5-4B": {"num_hidden_layers": 4},
    "Qwen3.5-35B-A3B": {"num_hidden_layers": 4},
    "Gemma-4-E4B": SHARING | {"sliding_window": 200},
    "Gemma-4-26B-A4B": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 200},
}


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("shape", list(REAL))
def test_real_shapes(shape: str) -> None:
    """Beside 0, 5 and 64 sequences that generate, and up to five other prompts."""
    model = model_of(RandomCheckpoint(SHAPES[shape] | REAL[shape], DEVICE), torch.bfloat16)
    sizes = (1, 7, 64, 100, 128, 512) if model.config.delta is None else (64, 128)
    check_model(model, pool_of(model, torch.bfloat16, 300, 64), 600, sizes, (0, 5, 64))
