"""What `forerun check` tells: what was found, the memory plan, the exactness probe and its price."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.engine.probe import cancelling_rows
from forerun.kernels.matrix import FloatMatrix, Matrix
from forerun.language_model import LanguageModel
from forerun.loading import load_model
from forerun.media.reading import what_is_read
from forerun.memory_plan import page_bytes
from forerun.models.layers.decoder import Decoder
from forerun.progress import Progress


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One model on one machine."""

    family: str
    parameters: int
    layers: int
    hidden: int
    vocab: int
    context: int
    dtype: str
    weights_bytes: int
    page_bytes: int
    cache_tokens: int
    cache_bytes: int
    drafters: list[str]
    probe: list[tuple[int, bool]]
    guaranteed: bool
    exactness_cost: float | None  # time of a plain step's products over the fastest there are at that precision
    notes: list[str]


def inspect_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    max_context: int | None = None,
    memory: str | float | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Load a model and describe it."""
    loaded = load_model(
        model, device=device, dtype=dtype, quantize=quantize, max_context=max_context, memory=memory, progress=progress
    )
    with torch.inference_mode():
        return describe(loaded)


def describe(loaded: LanguageModel) -> CheckReport:
    """The report of a loaded model."""
    engine, decoder = loaded.engine, loaded.engine.model
    config, pool = decoder.config, engine.pool
    one_page = page_bytes(pool)
    notes = [f"products: {decoder.kernels.name}", *loaded.notes]
    if pool.states is not None and config.delta is not None:
        size = pool.states.bytes_per_slot(config.delta, config.recurrent_layers)
        notes.append(f"recurrent state: {size / 2**20:.1f} MiB per sequence, {pool.states.count} sequences")
    if loaded.media is not None:
        towers = f"towers of {loaded.media.weight_bytes / 2**20:.1f} MiB are loaded when media come"
        notes.append(f"reads {what_is_read(loaded.media)}; {towers}")
    if not loaded.probe.guaranteed:
        notes.append(f"passes are narrowed to {loaded.probe.widest} rows: wider ones change bits on this machine")
    return CheckReport(
        family=config.family,
        parameters=count_parameters(decoder),
        layers=len(config.layers),
        hidden=config.hidden,
        vocab=config.vocab,
        context=engine.context,
        dtype=loaded.machine.describe(),
        weights_bytes=decoder.weight_bytes,
        page_bytes=one_page,
        cache_tokens=pool.count * pool.page,
        cache_bytes=pool.count * one_page,
        drafters=list(engine.drafters.by_name),
        probe=list(loaded.probe.widths),
        guaranteed=loaded.probe.guaranteed,
        exactness_cost=exactness_cost(decoder),
        notes=notes,
    )


def count_parameters(decoder: Decoder) -> int:
    """Weights of matrices and embeddings; a tied output matrix counts once."""
    total = decoder.embedding.numel() + (0 if decoder.per_layer is None else decoder.per_layer.table.numel())
    if not decoder.config.tied:
        total += decoder.head.shape[0] * decoder.head.shape[1]
    return total + sum(matrix.shape[0] * matrix.shape[1] for matrix in decoder.block_matrices())


def exactness_cost(decoder: Decoder) -> float | None:
    """One row through one layer's products and the output matrix, ours over the fastest; CPU only."""
    if decoder.device.type != "cpu":
        return None
    work = [(matrix, fastest(matrix), cancelling_rows(1, matrix.shape[1])) for matrix in decoder.matrices()]
    ours, theirs = [], []
    for _ in range(7):
        began = time.perf_counter()
        for matrix, _, row in work:
            decoder.kernels.linear(row, matrix)
        between = time.perf_counter()
        for _, product, row in work:
            product(row)
        ours.append(between - began)
        theirs.append(time.perf_counter() - between)
    return min(ours) / min(*ours, *theirs)


def fastest(matrix: Matrix) -> Callable[[Tensor], Tensor]:
    """torch's own product with a weight of the same shape: float32, or int8 with bfloat16 activations."""
    if isinstance(matrix, FloatMatrix):
        weight = matrix.weight
        return lambda row: F.linear(row, weight)
    values = torch.randint(-127, 128, matrix.shape, dtype=torch.int8)
    scale = torch.ones(matrix.shape[0], dtype=torch.bfloat16)
    return lambda row: torch._weight_int8pack_mm(row.bfloat16(), values, scale)
