"""Weights of every format, repacked into tiles: the same codes and scales in the order in which products read them."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forerun.kernels.cpu.layout import BLOCK, OUTPUTS, PLANES, TileFormat
from forerun.kernels.formats import Codes
from forerun.kernels.parts import WeightPart

SLAB = 32 << 20  # bytes that are asked for at once
PIECE = 64  # output rows that are repacked at a time: what lies between stays in a core's cache
OUTER = {"f16": "half", "bf16": "bfloat", "f32": "float"}


@dataclass(slots=True)
class Tiles:
    """One part of a matrix as the products read it."""

    format: TileFormat | None  # None: plain floating point of `kind`
    kind: str
    outs: int
    inputs: int  # padded to whole groups
    data: NDArray[np.uint8]  # [tiles, bytes], begins at a multiple of 64

    @property
    def name(self) -> str:
        """Of the function that multiplies with it."""
        return self.kind if self.format is None else format_name(self.format)

    @property
    def groups(self) -> int:
        return self.inputs if self.format is None else self.inputs // self.format.group


def format_name(format: TileFormat) -> str:
    """Different formats have different names."""
    table = "" if not format.table else f"t{sum(31**index * value for index, value in enumerate(format.table)) % 997}"
    flags = ("i" if format.inner else "") + ("m" if format.minimum else "")
    return f"b{format.bits}g{format.group}p{format.part}{format.outer}{flags}z{format.zero}{table}"


def tile_format(part: WeightPart) -> TileFormat:
    """How a stored format is laid out in tiles."""
    format = part.format
    if format.affine:
        assert part.scales is not None
        outer = OUTER[part.scales.format.name]
        return TileFormat(format.bits, format.weights, format.weights, outer, False, True)
    codes = format.split(np.zeros((1, format.bytes), np.uint8))
    inner = codes.inner.shape[1] > 1
    outer = "half" if codes.outer.dtype == np.float16 else "float"
    table = () if codes.table is None else tuple(int(entry) for entry in codes.table)
    length = codes.length if inner else format.weights
    return TileFormat(
        codes.bits, format.weights, length, outer, inner, codes.outer_minimum is not None, codes.zero, table
    )


class TileMemory:
    """Zeros for tiles, in large pieces that the system may map by large pages: every pass reads all of them."""

    def __init__(self) -> None:
        self._slab: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def take(self, tiles: int, size: int) -> NDArray[np.uint8]:
        """[tiles, size], begins at a multiple of 64."""
        needed = tiles * size + -(tiles * size) % 64
        if needed > len(self._slab):
            room = _large_pages(max(needed, SLAB))
            if needed > SLAB // 2:
                return room[: tiles * size].reshape(tiles, size)
            self._slab = room
        found, self._slab = self._slab[: tiles * size], self._slab[needed:]
        return found.reshape(tiles, size)


def _large_pages(size: int) -> NDArray[np.uint8]:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(size, np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    with suppress(OSError):  # a system that was built without large ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def pack_part(part: WeightPart, memory: TileMemory) -> Tiles:
    """All rows of a stored matrix; the twin of `repacking.py`, and what does it for formats that are seldom met."""
    outs, inputs = part.shape
    if part.format.floats is not None:
        return pack_floats(part.rows(), memory) if part.format.name == "f32" else _pack_halves(part, memory)
    tiles = empty_tiles(part, memory)
    assert tiles.format is not None
    for start in range(0, outs, PIECE):
        stop = min(start + PIECE, outs)
        rows = pack_codes(tiles.format, part.split(start, stop), stop - start, inputs)
        tiles.data[start // OUTPUTS : start // OUTPUTS + len(rows)] = rows
    return tiles


def empty_tiles(part: WeightPart, memory: TileMemory) -> Tiles:
    """Room for a part, its format known."""
    outs, inputs = part.shape
    format = tile_format(part)
    return Tiles(format, "", outs, inputs, memory.take(-(-outs // OUTPUTS), format.tile_bytes(inputs)))


def pack_codes(format: TileFormat, codes: Codes, outs: int, inputs: int) -> NDArray[np.uint8]:
    """Blocks of `outs` rows → [tiles, bytes]; what is missing in the last tile is zeros."""
    groups = inputs // format.group
    tiles = -(-outs // OUTPUTS)

    def interleaved(values: NDArray[Any], each: int) -> NDArray[np.uint8]:
        """[outs · groups, each] → bytes [tiles, groups, each · 16 numbers]"""
        padded = np.zeros((tiles * OUTPUTS, groups, each), values.dtype)
        padded[:outs] = values.reshape(outs, groups, each)
        turned = padded.reshape(tiles, OUTPUTS, groups, each).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(turned).view(np.uint8).reshape(tiles, groups, -1)

    found = [interleaved(_outer(format, codes.outer), 1)]
    if format.minimum:
        assert codes.outer_minimum is not None
        found.append(interleaved(_outer(format, codes.outer_minimum), 1))
    if format.inner:
        found.append(interleaved(codes.inner, format.parts))
        if format.minimum:
            assert codes.inner_minimum is not None
            found.append(interleaved(codes.inner_minimum, format.parts))
    found.append(_planes(format, codes.code.reshape(outs, -1), tiles).reshape(tiles, groups, -1))
    return np.concatenate(found, axis=2).reshape(tiles, -1)


def _outer(format: TileFormat, values: NDArray[Any]) -> NDArray[Any]:
    """Outer factors in the number format of the tiles, which holds them exactly."""
    if format.outer == "half":
        return values.astype(np.float16)
    if format.outer == "float":
        return values.astype(np.float32)
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _planes(format: TileFormat, codes: NDArray[np.uint8], tiles: int) -> NDArray[np.uint8]:
    """Codes [outs, inputs] → [tiles, blocks of 32, bytes]: each plane's vectors side by side."""
    outs, inputs = codes.shape
    padded = np.full((tiles * OUTPUTS, inputs), 0, np.uint8)
    padded[:outs] = codes
    # [tiles, blocks, vectors, bytes of a vector]
    vectors = padded.reshape(tiles, OUTPUTS, inputs // BLOCK, 8, 4).transpose(0, 2, 3, 1, 4)
    vectors = np.ascontiguousarray(vectors).reshape(tiles, inputs // BLOCK, 8, 4 * OUTPUTS)
    found, shift = [], 0
    for width in PLANES[format.bits]:
        each = 8 // width
        part = vectors.reshape(tiles, inputs // BLOCK, width, each, 4 * OUTPUTS)
        plane = np.zeros((tiles, inputs // BLOCK, width, 4 * OUTPUTS), np.uint8)
        for index in range(each):
            plane |= ((part[:, :, :, index] >> np.uint8(shift)) & np.uint8((1 << width) - 1)) << np.uint8(index * width)
        found.append(plane.reshape(tiles, inputs // BLOCK, -1))
        shift += width
    return np.concatenate(found, axis=2)


def pack_rounded(values: NDArray[np.int8], scale: NDArray[np.float32], memory: TileMemory) -> Tiles:
    """Weights in 8 bits with one scale for each output row."""
    outs, inputs = values.shape
    wide = -(-inputs // BLOCK) * BLOCK
    group = next(size for size in (512, 256, 128, 64, BLOCK) if wide % size == 0)
    format = TileFormat(8, group, group, "float", False, False, zero=128)
    padded = np.zeros((outs, wide), np.int8)
    padded[:, :inputs] = values
    codes = padded.view(np.uint8) ^ np.uint8(128)
    outer = np.repeat(scale.astype(np.float32)[:, None], wide // group, axis=1).reshape(-1)
    data = memory.take(-(-outs // OUTPUTS), format.tile_bytes(wide))
    blocks = Codes(codes, 8, group, 128, outer, np.ones((len(outer), 1), np.uint8))
    data[:] = pack_codes(format, blocks, outs, wide)
    return Tiles(format, "", outs, wide, data)


def pack_blocks(weight: NDArray[np.float32], memory: TileMemory, bits: Literal[4, 8] = 8) -> Tiles:
    """Floats rounded to 8 or 4 bits, each 32 of a row with a scale of their own, as GGML's Q8_0 and Q4_0 have it."""
    outs, inputs = weight.shape
    wide = -(-inputs // BLOCK) * BLOCK
    zero = 1 << (bits - 1)
    format = TileFormat(bits, BLOCK, BLOCK, "half", False, False, zero=zero)
    data = memory.take(-(-outs // OUTPUTS), format.tile_bytes(wide))
    for start in range(0, outs, 1024):
        some = np.zeros((min(1024, outs - start), wide), np.float32)
        some[:, :inputs] = weight[start : start + 1024]
        blocks = some.reshape(-1, BLOCK)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
        # Four bits go from -8 to 7: the number of largest magnitude becomes -8, so that no step is left unused.
        delta = np.abs(largest) / np.float32(127) if bits == 8 else largest / np.float32(-8)
        with np.errstate(divide="ignore"):
            inverse = np.where(delta == 0, np.float32(0), np.float32(1) / delta)
        codes = np.rint(blocks * inverse[:, None]).clip(-zero, zero - 1).astype(np.int16) + zero
        scales = delta.astype(np.float16), np.ones((len(delta), 1), np.uint8)
        found = Codes(codes.astype(np.uint8), bits, BLOCK, zero, *scales)
        rows = pack_codes(format, found, len(some), wide)
        data[start // OUTPUTS : start // OUTPUTS + len(rows)] = rows
    return Tiles(format, "", outs, wide, data)


def pack_floats(weight: NDArray[Any], memory: TileMemory, kind: str = "float") -> Tiles:
    """Numbers as they are: 16 outputs side by side for every input."""
    outs, inputs = weight.shape
    data = memory.take(-(-outs // OUTPUTS), inputs * OUTPUTS * weight.dtype.itemsize)
    for tile in range(len(data)):
        rows = weight[tile * OUTPUTS : (tile + 1) * OUTPUTS]
        data[tile].view(weight.dtype).reshape(inputs, OUTPUTS)[:, : len(rows)] = rows.T
    return Tiles(None, kind, outs, inputs, data)


def pack_exact(weight: NDArray[np.float32], memory: TileMemory) -> Tiles:
    """Numbers as they are, in half the bytes where bfloat16 holds all of them, as it does for those of most files."""
    bits = weight.view(np.uint32)
    if not (bits & np.uint32(0xFFFF)).any():
        return pack_floats((bits >> np.uint32(16)).astype(np.uint16), memory, "bfloat")
    return pack_floats(weight, memory)


def _pack_halves(part: WeightPart, memory: TileMemory) -> Tiles:
    """float16 and bfloat16 as they are stored."""
    raw = np.ascontiguousarray(part.stored(0, part.shape[0])).view(np.uint16)
    return pack_floats(raw, memory, "half" if part.format.name == "f16" else "bfloat")
