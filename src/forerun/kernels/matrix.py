"""Packed weights of one linear layer, as the bodies of `linear` want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError

# Activations are split into two signed 7-bit digits, x ≈ scale · (128 · high + low): 14 bits, and no
# pair of products can saturate the 16-bit accumulators of CPUs that lack VNNI.
DIGIT = 128
HIGHEST = 63 * DIGIT + 63
BLOCK = 1024  # rows that are rounded at once: they fit into a core's cache


@dataclass(slots=True)
class FloatMatrix:
    """Weights kept in floating point."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclass(slots=True)
class IntMatrix:
    """Weights rounded to 8 bits with one scale per output row."""

    values: Tensor | None  # [out, in] int8; dropped where the packed form replaces it
    scale: Tensor  # [out] float32
    bias: Tensor | None  # [out] float32
    shape: tuple[int, int]
    packed: Any = None  # the library's own layout

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] + 4 * self.shape[0]


@dataclass(slots=True)
class TiledMatrix:
    """Weights repacked for a CPU's products: parts one below the other, each in its own format."""

    parts: list[Any]  # `kernels.cpu.tiles.Tiles`
    bias: Tensor | None  # [out] float32
    shape: tuple[int, int]

    @property
    def exact(self) -> bool:
        """Is nothing rounded, neither weights nor what they are multiplied with?"""
        return all(part.format is None for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


Matrix = FloatMatrix | IntMatrix | TiledMatrix


@dataclass(slots=True)
class Rounded:
    """Weights that were rounded to 8 bits before they were stored; works like the tensor it stands for."""

    values: Tensor  # [..., out, in] int8
    scale: Tensor  # [..., out] float32
    dtype: torch.dtype = torch.float32  # of the tensor it stands for

    def to(self, device: torch.device, dtype: torch.dtype) -> Rounded:
        """Stays in 8 bits."""
        return Rounded(self.values.to(device), self.scale.to(device), dtype)

    def __getitem__(self, index: int | Tensor) -> Rounded:
        """Some rows, or one of a stack of matrices."""
        return Rounded(self.values[index], self.scale[index], self.dtype)

    def tensor(self) -> Tensor:
        """[..., out, in], for bodies that do not multiply in 8 bits."""
        return self.float().to(self.dtype)

    def float(self) -> Tensor:
        """[..., out, in] float32."""
        return self.values.float() * self.scale[..., None]


Weight = Tensor | Rounded


def join(parts: list[Weight]) -> Weight:
    """Rows of several weights one after another."""
    rounded = [part for part in parts if isinstance(part, Rounded)]
    if len(rounded) == len(parts):
        values, scale = torch.cat([part.values for part in rounded]), torch.cat([part.scale for part in rounded])
        return Rounded(values, scale, rounded[0].dtype)
    return torch.cat([part.tensor() if isinstance(part, Rounded) else part for part in parts])


def round_to_int8(weight: Weight) -> tuple[Tensor, Tensor]:
    """Symmetric rounding per output row: returns int8 values [out, in] and float32 scales [out]."""
    if isinstance(weight, Rounded):
        return weight.values, weight.scale
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    for part, target, factor in zip(*(x.split(BLOCK) for x in (weight, values, scale)), strict=True):
        part = part.float()
        factor.copy_(part.abs().amax(dim=1) / 127)
        factor[factor == 0] = 1
        target.copy_((part / factor[:, None]).round_().clamp_(-127, 127))
    if not bool(scale.isfinite().all()):
        raise ForerunError("the weights hold values that are infinite or not a number: the checkpoint is broken")
    return values, scale


def split_digits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row of x [rows, in] as high and low digits (float32 integers) and the row's scale [rows]."""
    largest = x.abs().amax(dim=1)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    whole = (x * (HIGHEST / largest)[:, None]).round()
    high = (whole / DIGIT).round()
    return high, whole - high * DIGIT, largest / HIGHEST
