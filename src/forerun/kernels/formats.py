"""Number formats of stored weights, in one table: how many weights a block has, in how many bytes, and what they say.

Every format that is not plain floating point is one of

    value[j] = scale[j // length] · (code[j] − zero) − minimum[j // length]
    value[j] = scale[j // length] · table[code[j]]

with scale = outer · inner, minimum = outer_minimum · inner_minimum: one outer factor for each block, one small whole
number for each run of `length` weights. A scale has at most 19 significant bits (11 of a float16, 8 of the whole
number), and scale · (code − zero) at most 24: both are exact in float32, whatever the order of multiplication. Only the
subtraction of the minimum rounds. The values are those of the `gguf` package, bit for bit.

MLX computes scale · code + bias in the number format of the scales, which rounds to 8 or 11 bits; here it is float32.

>>> raw = np.array([[0, 60] + [0x98] * 16], np.uint8)  # a scale of 1, then codes 8 and 9
>>> FORMATS["q4_0"].unpack(raw)[0, [0, 16]]
array([0., 1.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

KVALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
LARGEST_E8M0 = 252  # exponents above it make 12 halves of their scale more than a float32 holds


@dataclass(frozen=True, slots=True)
class Codes:
    """Blocks taken apart. Factors that a format does not have are ones, minima that it does not have are None."""

    code: Bytes  # [blocks, weights], each below 2 ** bits
    bits: int
    length: int  # weights that share a scale: 16 or 32
    zero: int  # the code that stands for zero, where there is no table
    outer: NDArray[Any]  # [blocks] float16 or float32
    inner: NDArray[Any]  # [blocks, weights // length] int8 or uint8
    outer_minimum: NDArray[Any] | None = None  # [blocks] float16 or float32
    inner_minimum: NDArray[Any] | None = None  # [blocks, weights // length] uint8
    table: NDArray[np.int8] | None = None  # [16]

    @property
    def scale(self) -> Floats:
        """[blocks, weights // length], exact."""
        return _product(self.outer, self.inner)

    @property
    def minimum(self) -> Floats | None:
        """[blocks, weights // length], exact."""
        if self.outer_minimum is None or self.inner_minimum is None:
            return None
        return _product(self.outer_minimum, self.inner_minimum)

    def values(self) -> Floats:
        """[blocks, weights]"""
        grouped = self.code.reshape(len(self.code), -1, self.length)
        numbers = grouped.astype(np.float32) - np.float32(self.zero) if self.table is None else self.table[grouped]
        values: Floats = self.scale[:, :, None] * numbers
        if (minimum := self.minimum) is not None:
            values -= minimum[:, :, None]
        return values.reshape(self.code.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table. Affine formats keep scales and biases in tensors of their own, one of each per block."""

    name: str
    weights: int  # per block
    bytes: int  # per block
    number: int | None = None  # of the type in GGUF files
    bits: int = 0  # of a code; none in plain floating point
    factors: tuple[int, ...] = ()  # where a block has its float16 factors
    floats: Callable[[Bytes], Floats] | None = None  # plain floating point: [blocks, bytes] -> [blocks, weights]
    apart: Callable[[Bytes], Codes] | None = None  # everything else

    @property
    def affine(self) -> bool:
        """Whether scales and biases are stored apart, as MLX does."""
        return self.floats is None and self.apart is None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row, scales and biases that are stored apart not counted."""
        assert columns % self.weights == 0, "a row is whole blocks"
        return columns // self.weights * self.bytes

    def split(self, raw: Bytes, scales: Floats | None = None, biases: Floats | None = None) -> Codes:
        """[blocks, bytes] -> codes; affine formats need scales and biases [blocks]."""
        if self.apart is not None:
            return self.apart(raw)
        assert self.affine, f"{self.name} has no codes"
        assert scales is not None and biases is not None, f"{self.name} keeps scales and biases apart"
        ones = np.ones((len(raw), self.weights // 32), np.uint8)
        return Codes(_stream(raw, self.bits), self.bits, 32, 0, scales, ones, -biases, ones)

    def unpack(self, raw: Bytes, scales: Floats | None = None, biases: Floats | None = None) -> Floats:
        """[blocks, bytes] -> [blocks, weights]"""
        if self.floats is not None:
            return self.floats(raw)
        with np.errstate(all="ignore"):  # scales of a damaged file
            return self.split(raw, scales, biases).values()

    def finite(self, raw: Bytes) -> bool:
        """Whether all values of [blocks, bytes] are numbers, by a look at the bytes that hold exponents."""
        if self.name == "mxfp4":
            return not bool((raw[:, 0] > LARGEST_E8M0).any())
        if self.floats is None:
            return all(bool((raw[:, at + 1] & 0x7C != 0x7C).all()) for at in self.factors)
        if self.name == "f16":
            return bool((raw[:, 1] & 0x7C != 0x7C).all())
        return bool(((raw[:, -1] & 0x7F != 0x7F) | (raw[:, -2] & 0x80 == 0)).all())


def _product(outer: NDArray[Any], inner: NDArray[Any]) -> Floats:
    return outer.astype(np.float32)[:, None] * inner.astype(np.float32)


def _half(raw: Bytes, start: int) -> NDArray[np.float16]:
    """The float16 that begins at a byte of each block."""
    return np.ascontiguousarray(raw[:, start : start + 2]).view("<f2")[:, 0]


def _planes(raw: Bytes, width: int, bits: int) -> Bytes:
    """Runs of `width` bytes hold the low bits of as many codes, then the next bits of as many more, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = raw.reshape(len(raw), -1, 1, width) >> shifts
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(len(raw), -1)


def _stream(raw: Bytes, bits: int) -> Bytes:
    """Codes of `bits` bits one after another, from the lowest bit of the first byte on, across bytes."""
    period = int(np.lcm(bits, 8))  # bits after which a code begins with a byte again
    packs = raw.reshape(len(raw), -1, period // 8)
    codes = np.empty((*packs.shape[:2], period // bits), np.uint8)
    for index in range(period // bits):
        byte, shift = divmod(index * bits, 8)
        found = packs[:, :, byte] >> np.uint8(shift)
        if shift + bits > 8:
            found = found | packs[:, :, byte + 1] << np.uint8(8 - shift)
        codes[:, :, index] = found & np.uint8((1 << bits) - 1)
    return codes.reshape(len(raw), -1)


def _ones(raw: Bytes) -> Bytes:
    return np.ones((len(raw), 1), np.uint8)


def _q4_0(raw: Bytes) -> Codes:
    return Codes(_planes(raw[:, 2:], 16, 4), 4, 32, 8, _half(raw, 0), _ones(raw))


def _q4_1(raw: Bytes) -> Codes:
    return Codes(_planes(raw[:, 4:], 16, 4), 4, 32, 0, _half(raw, 0), _ones(raw), -_half(raw, 2), _ones(raw))


def _fifth_bits(raw: Bytes, start: int) -> Bytes:
    """Nibbles, and before them 32 bits that go on top of them."""
    high = np.unpackbits(raw[:, start : start + 4], axis=1, bitorder="little")
    return _planes(raw[:, start + 4 :], 16, 4) | high << np.uint8(4)


def _q5_0(raw: Bytes) -> Codes:
    return Codes(_fifth_bits(raw, 2), 5, 32, 16, _half(raw, 0), _ones(raw))


def _q5_1(raw: Bytes) -> Codes:
    return Codes(_fifth_bits(raw, 4), 5, 32, 0, _half(raw, 0), _ones(raw), -_half(raw, 2), _ones(raw))


def _q8_0(raw: Bytes) -> Codes:
    return Codes(raw[:, 2:] ^ np.uint8(128), 8, 32, 128, _half(raw, 0), _ones(raw))


def _q2_k(raw: Bytes) -> Codes:
    scales, codes = raw[:, :16], _planes(raw[:, 16:80], 32, 2)
    inner, minimum = scales & np.uint8(15), scales >> np.uint8(4)
    return Codes(codes, 2, 16, 0, _half(raw, 80), inner, _half(raw, 82), minimum)


def _q3_k(raw: Bytes) -> Codes:
    """A bit that is set in the mask at the beginning stands for codes that are not negative."""
    codes = _planes(raw[:, 32:96], 32, 2) | _planes(raw[:, :32], 32, 1) << np.uint8(2)
    inner = _planes(raw[:, 96:104], 8, 4) | _planes(raw[:, 104:108], 4, 2) << np.uint8(4)
    return Codes(codes, 3, 16, 4, _half(raw, 108), inner.view(np.int8) - np.int8(32))


def _six_bit_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 bytes behind the two factors of q4_k and q5_k: eight scales and eight minima of 6 bits [blocks, 8]."""
    scale, minimum, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    low, high = np.uint8(63), np.uint8(48)
    return (
        np.hstack([scale & low, rest & np.uint8(15) | scale >> np.uint8(2) & high]),
        np.hstack([minimum & low, rest >> np.uint8(4) | minimum >> np.uint8(2) & high]),
    )


def _q4_k(raw: Bytes) -> Codes:
    inner, minimum = _six_bit_scales(raw)
    return Codes(_planes(raw[:, 16:], 32, 4), 4, 32, 0, _half(raw, 0), inner, _half(raw, 2), minimum)


def _q5_k(raw: Bytes) -> Codes:
    inner, minimum = _six_bit_scales(raw)
    codes = _planes(raw[:, 48:], 32, 4) | _planes(raw[:, 16:48], 32, 1) << np.uint8(4)
    return Codes(codes, 5, 32, 0, _half(raw, 0), inner, _half(raw, 2), minimum)


def _q6_k(raw: Bytes) -> Codes:
    codes = _planes(raw[:, :128], 64, 4) | _planes(raw[:, 128:192], 32, 2) << np.uint8(4)
    return Codes(codes, 6, 16, 32, _half(raw, 208), raw[:, 192:208].view(np.int8))


def _iq4_nl(raw: Bytes) -> Codes:
    return Codes(_planes(raw[:, 2:], 16, 4), 4, 32, 0, _half(raw, 0), _ones(raw), table=KVALUES)


def _iq4_xs(raw: Bytes) -> Codes:
    low = (raw[:, 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)).reshape(-1, 8)
    high = (raw[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)).reshape(-1, 8)
    inner = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return Codes(_planes(raw[:, 8:], 16, 4), 4, 32, 0, _half(raw, 0), inner, table=KVALUES)


def _mxfp4(raw: Bytes) -> Codes:
    """The exponent is that of half the scale: the table holds twice the values."""
    exponent = raw[:, 0].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    return Codes(_planes(raw[:, 1:], 16, 4), 4, 32, 0, bits.view(np.float32), _ones(raw), table=E2M1_DOUBLED)


def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


MLX_BITS = (2, 3, 4, 5, 6, 8)
MLX_GROUPS = (32, 64, 128)

_TABLE = (
    Format("f32", 1, 4, 0, floats=_f32),
    Format("f16", 1, 2, 1, floats=_f16),
    Format("bf16", 1, 2, 30, floats=_bf16),
    Format("q4_0", 32, 18, 2, 4, (0,), apart=_q4_0),
    Format("q4_1", 32, 20, 3, 4, (0, 2), apart=_q4_1),
    Format("q5_0", 32, 22, 6, 5, (0,), apart=_q5_0),
    Format("q5_1", 32, 24, 7, 5, (0, 2), apart=_q5_1),
    Format("q8_0", 32, 34, 8, 8, (0,), apart=_q8_0),
    Format("q2_k", 256, 84, 10, 2, (80, 82), apart=_q2_k),
    Format("q3_k", 256, 110, 11, 3, (108,), apart=_q3_k),
    Format("q4_k", 256, 144, 12, 4, (0, 2), apart=_q4_k),
    Format("q5_k", 256, 176, 13, 5, (0, 2), apart=_q5_k),
    Format("q6_k", 256, 210, 14, 6, (208,), apart=_q6_k),
    Format("iq4_nl", 32, 18, 20, 4, (0,), apart=_iq4_nl),
    Format("iq4_xs", 256, 136, 23, 4, (0,), apart=_iq4_xs),
    Format("mxfp4", 32, 17, 39, 4, apart=_mxfp4),
    *(Format(f"mlx{bits}_{group}", group, group * bits // 8, bits=bits) for bits in MLX_BITS for group in MLX_GROUPS),
)
FORMATS = {each.name: each for each in _TABLE}
GGUF_FORMATS = {each.number: each for each in _TABLE if each.number is not None}
