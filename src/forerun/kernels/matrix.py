"""Packed weights of one linear layer, as the bodies of `linear` want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.parts import WeightPart

CPU = torch.device("cpu")
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
    def kind(self) -> tuple[str, ...]:
        """Matrices of one kind and shape are multiplied by the same routine."""
        return (str(self.weight.dtype),)

    @property
    def bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


@dataclass(slots=True)
class TiledMatrix:
    """Weights repacked for a CPU's products: parts one below the other, each in its own format."""

    parts: list[Any]  # `kernels.cpu.tiles.Tiles`
    bias: Tensor | None  # [out] float32
    shape: tuple[int, int]

    @property
    def kind(self) -> tuple[str, ...]:
        """Number formats of the parts."""
        return tuple(part.name for part in self.parts)

    @property
    def exact(self) -> bool:
        """Is nothing rounded, neither weights nor what they are multiplied with?"""
        return all(part.format is None for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


Matrix = FloatMatrix | TiledMatrix


@dataclass(slots=True)
class Rounded:
    """Weights that were rounded to 8 bits before they were stored; works like the tensor it stands for."""

    values: Tensor  # [..., out, in] int8
    scale: Tensor  # [..., out] float32
    dtype: torch.dtype = torch.float32  # of the tensor it stands for

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

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


@dataclass(frozen=True, slots=True)
class Parts:
    """Weights as they are stored, one part below the other; works like the tensor it stands for."""

    parts: tuple[WeightPart, ...]  # matrices with the same columns, or one stack of matrices
    dtype: torch.dtype = torch.float32  # of the tensor it stands for
    device: torch.device = CPU

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return first if len(first) == 3 else (sum(part.shape[0] for part in self.parts), first[1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def numel(self) -> int:
        return prod(self.shape)

    def to(self, device: torch.device, dtype: torch.dtype) -> Parts:
        """Stays as it is stored; `tensor` is what is asked for."""
        return replace(self, device=device, dtype=dtype)

    def __getitem__(self, index: int | Tensor) -> Parts:
        """Some rows, or one of a stack of matrices."""
        (part,) = self.parts
        return replace(self, parts=(part[index if isinstance(index, int) else index.cpu().numpy()],))

    def tensor(self) -> Tensor:
        """[..., out, in], for bodies that do not multiply with weights as they are stored."""
        if self.device.type == "meta":
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        decoded = [torch.from_numpy(part.rows()).to(self.dtype) for part in self.parts]
        return (decoded[0] if len(decoded) == 1 else torch.cat(decoded)).to(self.device)

    def float(self) -> Tensor:
        """[..., out, in] float32."""
        return self.to(self.device, torch.float32).tensor()


Weight = Tensor | Rounded | Parts
Table = Tensor | Parts  # rows that are looked up


def as_tensor(weight: Weight) -> Tensor:
    """[..., out, in], however it is stored."""
    return weight if isinstance(weight, Tensor) else weight.tensor()


def join(weights: list[Weight]) -> Weight:
    """Rows of several weights one after another."""
    mapped = [weight for weight in weights if isinstance(weight, Parts)]
    if len(mapped) == len(weights):
        return replace(mapped[0], parts=tuple(part for weight in mapped for part in weight.parts))
    rounded = [weight for weight in weights if isinstance(weight, Rounded)]
    if len(rounded) == len(weights):
        values, scales = [weight.values for weight in rounded], [weight.scale for weight in rounded]
        return Rounded(torch.cat(values), torch.cat(scales), rounded[0].dtype)
    return torch.cat([as_tensor(weight) for weight in weights])


def pieces(weight: Tensor | Parts) -> Iterator[Tensor]:
    """Its rows in float32, some at a time."""
    if isinstance(weight, Tensor):
        yield from (rows.float() for rows in weight.split(BLOCK))
        return
    for part in weight.parts:
        for start in range(0, part.shape[0], BLOCK):
            yield torch.from_numpy(part.rows(start, start + BLOCK)).to(weight.device)


def round_to_int8(weight: Weight) -> tuple[Tensor, Tensor]:
    """Symmetric rounding per output row: returns int8 values [out, in] and float32 scales [out]."""
    if isinstance(weight, Rounded):
        return weight.values, weight.scale
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device)
    start = 0
    for part in pieces(weight):
        target, factor = values[start : start + len(part)], scale[start : start + len(part)]
        factor.copy_(part.abs().amax(dim=1) / 127)
        factor[factor == 0] = 1
        target.copy_((part / factor[:, None]).round_().clamp_(-127, 127))
        start += len(part)
    if not bool(scale.isfinite().all()):
        raise ForerunError("the weights hold values that are infinite or not a number: the checkpoint is broken")
    return values, scale
