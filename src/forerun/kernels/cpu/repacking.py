"""GGML's blocks repacked into tiles, written as LLVM IR: a model of a gigabyte is ready in a second.

`tiles.pack_codes` does the same in numpy and is the twin that tests compare with. Formats that are not in `LAYOUTS` are
repacked by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.kernels.cpu.emit import Function, Module, Value
from forerun.kernels.cpu.layout import BLOCK, BYTES, OUTPUTS, PLANES, VECTOR, TileFormat

# Arguments: the address of a one, the first stored row, bytes of a row, row map or null, rows, groups, tiles, tiles
# of a piece.
ONE, ROWS, ROW_BYTES, ROW_MAP, OUTS, GROUPS, TILES, PER_PIECE = range(8)

Codes = Callable[[Function, Value, int], Value]  # the codes of block number n of a group: <32 x i8>
Factors = Callable[[Function, Value], list[Value]]  # of a group, as `TileFormat` orders them: one byte for each part


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the parts of a stored block are."""

    size: int  # bytes
    codes: Codes
    outer: int | None  # of the float16 scale; None: `exponent` says it
    minimum: int | None = None  # of the float16 minimum
    added: bool = False  # what is stored is added, where tiles hold what is subtracted
    inner: Factors | None = None


def _nibbles(f: Function, base: Value, at: int) -> Value:
    """16 bytes: low halves, then high halves."""
    packed = f.load(base, "<16 x i8>", at)
    return f.shuffle(packed & 15, packed >> 4, range(32))


def _plain(at: int) -> Codes:
    return lambda f, base, block: _nibbles(f, base, at + 16 * block)


def _with_fifth_bit(bits_at: int, at: int) -> Codes:
    """32 bits go on top of the nibbles."""

    def read(f: Function, base: Value, _: int) -> Value:
        bits = f.splat(f.load(base, "i32", bits_at), BLOCK) >> f.vector(range(BLOCK), "i32")
        high = f.convert(bits & 1, "trunc", "i8") << 4
        return _nibbles(f, base, at) | high

    return read


def _bytes(f: Function, base: Value, block: int) -> Value:
    return f.load(base, "<32 x i8>", 2 + 32 * block) ^ -128


def _run(f: Function, base: Value, at: int, bits: int, number: int) -> Value:
    """32 bytes hold the low bits of as many codes, then the next bits of as many more: run `number` of them."""
    packed = f.load(base, "<32 x i8>", at)
    shift = bits * number
    return (packed >> shift if shift else packed) & ((1 << bits) - 1)


def _q4_k(f: Function, base: Value, block: int) -> Value:
    return _run(f, base, 16 + 32 * (block // 2), 4, block % 2)


def _q5_k(f: Function, base: Value, block: int) -> Value:
    return _run(f, base, 48 + 32 * (block // 2), 4, block % 2) | (_run(f, base, 16, 1, block) << 4)


def _q6_k(f: Function, base: Value, block: int) -> Value:
    half, quarter = divmod(block, 4)
    low = _run(f, base, 64 * half + 32 * (quarter % 2), 4, quarter // 2)
    return low | (_run(f, base, 128 + 32 * half, 2, quarter) << 4)


def _q2_k(f: Function, base: Value, block: int) -> Value:
    return _run(f, base, 16 + 32 * (block // 4), 2, block % 4)


def _q3_k(f: Function, base: Value, block: int) -> Value:
    return _run(f, base, 32 + 32 * (block // 4), 2, block % 4) | (_run(f, base, 0, 1, block) << 2)


def _lanes(f: Function, value: Value) -> list[Value]:
    return [f.extract(value, lane) for lane in range(value.lanes)]


def _six_bits(f: Function, base: Value) -> list[Value]:
    """Eight scales and eight minima of six bits in 12 bytes."""
    scale, minimum, rest = (f.load(base, "<4 x i8>", at) for at in (4, 8, 12))
    found = [scale & 63, (rest & 15) | ((scale >> 2) & 48), minimum & 63, (rest >> 4) | ((minimum >> 2) & 48)]
    return [lane for part in found for lane in _lanes(f, part)]


def _sixteen(f: Function, base: Value) -> list[Value]:
    return _lanes(f, f.load(base, "<16 x i8>", 192))


def _both_halves(f: Function, base: Value) -> list[Value]:
    both = f.load(base, "<16 x i8>", 0)
    return [*_lanes(f, both & 15), *_lanes(f, both >> 4)]


def _less_32(f: Function, base: Value) -> list[Value]:
    """Six bits in two places, signed."""
    low, high = f.load(base, "<8 x i8>", 96), f.load(base, "<4 x i8>", 104)
    lows = f.shuffle(low & 15, low >> 4, range(16))
    pairs = f.shuffle(high, None, [index % 4 for index in range(16)])
    shifts = f.vector([2 * (index // 4) for index in range(16)], "i8")
    return _lanes(f, (lows | (((pairs >> shifts) & 3) << 4)) - 32)


def _iq4_xs_scales(f: Function, base: Value) -> list[Value]:
    low, high = f.load(base, "<4 x i8>", 4), f.load(base, "i16", 2)
    nibbles = f.shuffle(low & 15, low >> 4, [index // 2 + 4 * (index % 2) for index in range(8)])
    shifts = f.vector(range(0, 16, 2), "i16")
    tops = f.convert((f.splat(high, 8) >> shifts) & 3, "trunc", "i8")
    return _lanes(f, (nibbles | (tops << 4)) - 32)


LAYOUTS = {
    "q4_0": BlockLayout(18, _plain(2), 0),
    "q4_1": BlockLayout(20, _plain(4), 0, 2, True),
    "q5_0": BlockLayout(22, _with_fifth_bit(2, 6), 0),
    "q5_1": BlockLayout(24, _with_fifth_bit(4, 8), 0, 2, True),
    "q8_0": BlockLayout(34, _bytes, 0),
    "q2_k": BlockLayout(84, _q2_k, 80, 82, inner=_both_halves),
    "q3_k": BlockLayout(110, _q3_k, 108, inner=_less_32),
    "q4_k": BlockLayout(144, _q4_k, 0, 2, inner=_six_bits),
    "q5_k": BlockLayout(176, _q5_k, 0, 2, inner=_six_bits),
    "q6_k": BlockLayout(210, _q6_k, 208, inner=_sixteen),
    "iq4_nl": BlockLayout(18, _plain(2), 0),
    "iq4_xs": BlockLayout(136, _plain(8), 0, inner=_iq4_xs_scales),
    "mxfp4": BlockLayout(17, _plain(1), None),
}


def write_repacking(module: Module, name: str, format: TileFormat) -> None:
    """void repack_NAME(arguments, piece)."""
    layout = LAYOUTS[name]
    f = module.function(f"repack_{name}", [("arguments", "ptr"), ("piece", "i64")])
    word = [f.load(f["arguments"], "i64", 8 * index, 8) for index in range(PER_PIECE + 1)]
    rows, row_map, tiles = (f.load(f["arguments"], "ptr", 8 * index, 8) for index in (ROWS, ROW_MAP, TILES))
    count = (word[OUTS] + (OUTPUTS - 1)) // OUTPUTS
    first = f["piece"] * word[PER_PIECE]
    mapped = f.compare("ne", row_map, Value(f, "ptr", "null"))
    tile_bytes = word[GROUPS] * format.group_bytes
    row = f.room(8)
    with f.loop(first, f.minimum(first + word[PER_PIECE], count)) as tile:
        begin = tile.index * OUTPUTS
        with f.loop(0, f.minimum(word[OUTS] - begin, OUTPUTS)) as output:
            number = begin + output.index
            f.store(number, row, 0, 8)
            with f.when(mapped):
                f.store(f.load(row_map, "i64", number * 8, 8), row, 0, 8)
            source = f.at(rows, f.load(row, "i64", 0, 8) * word[ROW_BYTES])
            target = f.at(tiles, tile.index * tile_bytes)
            with f.loop(0, word[GROUPS]) as group:
                base = f.at(source, group.index * layout.size)
                _write_group(f, layout, format, base, f.at(target, group.index * format.group_bytes), output.index)
    f.ret()


def _write_group(f: Function, layout: BlockLayout, format: TileFormat, base: Value, tile: Value, output: Value) -> None:
    """One output's part of a group."""
    factor = f.at(tile, output * BYTES[format.outer])
    if layout.outer is None:
        exponent = f.convert(f.load(base, "i8"), "zext", "i32")
        small = f.constant(0x00200000, "i32") << exponent
        bits = f.select(f.compare("ult", exponent, 2), small, (exponent - 1) << 23)
        f.store(bits, factor)
    else:
        f.store(f.load(base, "i16", layout.outer), factor)
    if layout.minimum is not None:
        least = f.load(base, "i16", layout.minimum)
        f.store(least ^ -32768 if layout.added else least, factor, format.minimum_at())
    if layout.inner is not None:
        place = f.at(tile, output)
        for part, value in enumerate(layout.inner(f, base)):
            f.store(value, place, format.inner_at(part))
    for block in range(format.group // BLOCK):
        codes, shift = layout.codes(f, base, block), 0
        at = format.header + block * format.block_bytes
        for width in PLANES[format.bits]:
            each = 8 // width
            plane: Value | None = None
            for index in range(each):
                order = [4 * (vector * each + index) + byte for vector in range(width) for byte in range(4)]
                some = f.shuffle(codes, None, order)
                some = (some >> shift if shift else some) & ((1 << width) - 1)
                some = some << (index * width) if index else some
                plane = some if plane is None else plane | some
            assert plane is not None
            words = f.bitcast(plane, f"<{width} x i32>")
            for vector in range(width):
                f.store(f.extract(words, vector), f.at(tile, output * 4), at + VECTOR * vector)
            at += VECTOR * width
            shift += width
