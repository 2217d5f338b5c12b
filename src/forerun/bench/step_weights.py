"""The weights that a step has to read: of a mixture of experts, those that its rows are sent to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from torch import Tensor

from forerun.kernels.interface import Experts, Stacked
from forerun.kernels.matrix import FloatMatrix, Matrix
from forerun.models.layers.decoder import Decoder


def step_matrices(decoder: Decoder) -> list[Matrix]:
    """What one row is multiplied with; of experts as many as it goes to, whichever they are."""
    found = dense_matrices(decoder)
    for layer in decoder.layers:
        if layer.mixture is not None:
            found += first_experts(layer.mixture.experts, layer.mixture.top)
    return found


def dense_matrices(decoder: Decoder) -> list[Matrix]:
    """What every row is multiplied with."""
    found = [matrix for layer in decoder.layers for matrix in layer.dense_matrices()]
    own = [] if decoder.per_layer is None else [decoder.per_layer.project]
    return [*own, *found, decoder.head]


def first_experts(experts: Experts, count: int) -> list[Matrix]:
    """Stacked ones as two matrices, so that products with them are as few as they can be."""
    if isinstance(experts, Stacked):
        return [FloatMatrix(stack[:count].flatten(0, 1), None) for stack in (experts.gate_up, experts.down)]
    return [matrix for expert in experts[:count] for matrix in (expert.gate_up, expert.down)]


def pass_bytes(decoder: Decoder, chosen: Sequence[int]) -> int:
    """Bytes of the linear layers of a pass; `chosen`: how many experts its rows go to, by layer that has any."""
    total = sum(matrix.bytes for matrix in dense_matrices(decoder))
    mixtures = [layer.mixture for layer in decoder.layers if layer.mixture is not None]
    for mixture, count in zip(mixtures, chosen, strict=True):
        total += sum(matrix.bytes for matrix in first_experts(mixture.experts, count))
    return total


def chosen_experts(decoder: Decoder, launch: Callable[[], Any]) -> list[int]:
    """To how many different experts the rows of a pass go, layer by layer; `launch` runs the pass."""
    counts, route = [], decoder.kernels.route

    def count(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(logits, *others)
        counts.append(len(ids.unique()))
        return ids, weights

    with patch.object(decoder.kernels, "route", count):
        launch()
    return counts
