"""How weights lie in memory for the products: tiles of 16 outputs, interleaved, so that nothing has to be folded.

A tile holds 16 output rows from the first input to the last, group by group. A group begins with its scales, then has
the codes of 32 inputs at a time, cut into planes of 8, 4, 2 or 1 bits: byte `4 · output + input % 4` of a vector of 64
bytes belongs to that output and input. Codes of 3, 5 and 6 bits are two planes. No value is rounded again.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUTS = 16  # of a tile
BLOCK = 32  # inputs whose activations share a scale
VECTOR = 64  # bytes: 16 outputs, four inputs each
RECORD = 64  # bytes of a block of activations: 32 values, then what `ACTIVATION` lists
DELTA, SUM_SCALED, SUM = 32, 36, 40  # offsets: the scale, −scale · sum, −sum
HALF_SUM, HALF_SUM_SCALED = (48, 52), (56, 60)  # of the first and the second 16 values
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
BYTES = {"half": 2, "bfloat": 2, "float": 4}


@dataclass(frozen=True, slots=True)
class TileFormat:
    """What the inner loop has to know of a format: value = scale · (code − zero) − minimum, or scale · table[code]."""

    bits: int
    group: int  # inputs that share the outer scale: a multiple of 32
    part: int  # inputs that share an inner scale: 16, 32, or the group where there is none
    outer: str  # LLVM's type of the outer scale
    inner: bool  # are there inner scales, int8 each?
    minimum: bool  # is something subtracted? With inner factors as the scales have them
    zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Inner scales of a group and output."""
        return self.group // self.part

    @property
    def header(self) -> int:
        """Bytes before a group's codes."""
        count = 2 if self.minimum else 1
        return OUTPUTS * count * (BYTES[self.outer] + (self.parts if self.inner else 0))

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of 32 inputs."""
        return OUTPUTS * BLOCK * self.bits // 8

    @property
    def group_bytes(self) -> int:
        return self.header + self.group // BLOCK * self.block_bytes

    def minimum_at(self) -> int:
        """Where the outer factors of the minimum are."""
        return OUTPUTS * BYTES[self.outer]

    def inner_at(self, part: int) -> int:
        """Where the inner scales of a part are."""
        return OUTPUTS * (BYTES[self.outer] * (2 if self.minimum else 1) + part)

    def inner_minimum_at(self, part: int) -> int:
        return self.inner_at(self.parts + part)

    def tile_bytes(self, inputs: int) -> int:
        """Of 16 outputs; `inputs` is padded to whole groups."""
        return -(-inputs // self.group) * self.group_bytes
