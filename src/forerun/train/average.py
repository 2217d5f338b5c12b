"""An average of the weights over the last part of training, which drafts a little better than the last weights do.

The part is a share of the steps made so far: nobody has to know how many there will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """Polynomial-decay average: the k-th step of t weighs about (k/t)^sharpness."""

    def __init__(self, weights: Mapping[str, Tensor], sharpness: float) -> None:
        self.sharpness = sharpness
        self.count = 0
        self.values = copied(weights)

    @torch.no_grad()
    def add(self, weights: Mapping[str, Tensor]) -> None:
        """The weights after a step."""
        self.count += 1
        share = (self.sharpness + 1) / (self.count + self.sharpness)
        names = list(self.values)
        torch._foreach_lerp_([self.values[name] for name in names], [weights[name] for name in names], share)

    def load(self, values: Mapping[str, Tensor], count: int) -> None:
        """Go on from saved values."""
        self.count = count
        put(self.values, values)


@contextmanager
def weights_replaced(weights: Mapping[str, Tensor], by: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block the tensors of `weights` hold other values."""
    kept = copied(weights)
    put(weights, by)
    try:
        yield
    finally:
        put(weights, kept)


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values that stay as they are while the weights go on."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


@torch.no_grad()
def put(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors in place, so that an optimiser keeps them."""
    for name, tensor in weights.items():
        tensor.copy_(values[name])
