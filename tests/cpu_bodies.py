"""CPU kernels of one body, and random weights of any stored format, for tests that compare bodies."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from torch import Tensor

from forerun.home import forerun_home
from forerun.kernels.cpu.library import library_of
from forerun.kernels.cpu.machine import Body, usable_bodies
from forerun.kernels.cpu.ops import CpuKernels, tiled
from forerun.kernels.cpu.tiles import TileMemory, Tiles, pack_part
from forerun.kernels.formats import FORMATS
from forerun.kernels.matrix import Rounded, TiledMatrix, Weight, round_to_int8
from forerun.kernels.parts import WeightPart

FIRST, *OTHERS = usable_bodies()
# Where the float16 factors of a block are, in formats that the gguf package reads but does not write.
HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,)}
HALVES |= {"iq4_xs": (0,)}


class RoundsRows(CpuKernels):
    """Rounds when it loads, as conversion does."""

    def matrix(self, weight: Weight, bias: Tensor | None) -> TiledMatrix:
        return super().matrix(Rounded(*round_to_int8(weight)), bias)


@cache
def kernels_of(body: Body, quantize: bool = True, threads: int = 1) -> CpuKernels:
    """Compiled code is kept for the next run, as a user's is."""
    kernels = CpuKernels(quantize)
    kernels.library = library_of(body, forerun_home() / "code", threads)
    return kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(name: str, rows: int, columns: int, scales: str = "f16") -> WeightPart:
    """A matrix as a file has it: values of about one."""
    form, noise = FORMATS[name], np.random.default_rng([rows, *name.encode()])
    values = noise.normal(size=(rows, columns)).astype(np.float32)
    blocks = columns // form.weights
    if form.affine:
        factors = [noise.normal(size=(rows, blocks)).astype(np.float32) for _ in range(2)]
        apart = [_floats(scales, each / 2**form.bits * (1 + index)) for index, each in enumerate(factors)]
        return WeightPart(
            form, noise.integers(0, 256, (rows, form.row_bytes(columns)), np.uint8), values.shape, None, *apart
        )
    if form.floats is not None:
        return _floats(name, values)
    if name not in HALVES and name != "mxfp4":
        return WeightPart(
            form, quantize(values, gguf.GGMLQuantizationType[name.upper()]).reshape(rows, -1), values.shape
        )
    raw = noise.integers(0, 256, (rows * blocks, form.bytes), np.uint8)
    for start in HALVES.get(name, ()):
        raw[:, start : start + 2] = (noise.random((len(raw), 1)) / 200).astype(np.float16).view(np.uint8)
    if name == "mxfp4":
        raw[:, 0] = noise.integers(120, 128, len(raw))
    return WeightPart(form, raw.reshape(rows, -1), values.shape)


def _floats(name: str, values: np.ndarray) -> WeightPart:
    if name == "bf16":
        raw = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        raw = values.astype({"f16": np.float16, "f32": np.float32}[name])
    return WeightPart(FORMATS[name], raw.view(np.uint8).reshape(len(values), -1), values.shape)


def matrix_of(*parts: WeightPart, bias: Tensor | None = None) -> TiledMatrix:
    """Parts one below the other."""
    outs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return tiled([packed(part) for part in parts], bias, (outs, inputs))


def packed(part: WeightPart) -> Tiles:
    """By numpy: slow, and the same for every body."""
    return pack_part(part, TileMemory())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """What is not a number may be any of those on another machine."""
    left, right = torch.nan_to_num(left, nan=1234.5), torch.nan_to_num(right, nan=1234.5)
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations as products see them, step by step: whole numbers [rows, blocks, 32] and scales [rows, blocks]."""
    wide = np.zeros((len(x), -(-x.shape[1] // 32) * 32), np.float32)
    wide[:, : x.shape[1]] = x
    blocks = wide.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    largest[largest == 0] = 1
    codes = np.rint(blocks * (np.float32(127) / largest)[:, :, None])
    return codes.astype(np.int8), largest * np.float32(1 / 127)
