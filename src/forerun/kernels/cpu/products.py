"""Products of rounded activations with weights of few bits, written as LLVM IR for one body.

Activations are rounded to 8 bits for each row and block of 32 inputs. Inside a block the sums are whole numbers, so
exact in any order; blocks are added in order, each by the same float operations. So a row's result depends neither on
the rows beside it nor on the body: every body and every number of rows gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.kernels.cpu.emit import Function, Module, Value
from forerun.kernels.cpu.layout import (
    BLOCK,
    BYTES,
    DELTA,
    HALF_SUM,
    HALF_SUM_SCALED,
    OUTPUTS,
    PLANES,
    RECORD,
    SUM,
    SUM_SCALED,
    VECTOR,
    TileFormat,
)
from forerun.kernels.cpu.machine import Body

# Arguments of a product, by their place among the 64-bit words that `product` reads.
ROWS, X, X_STRIDE, TILES, GROUPS, OUT, OUT_STRIDE, OUTS, TILES_PER_PIECE, ROWS_PER_PIECE, BIAS, BEFORE = range(12)
ARGUMENTS = 12


AHEAD = 8192  # bytes of weights that are asked for before they are needed


class ProductWriter:
    """Writes the functions of one format."""

    def __init__(self, module: Module, body: Body, format: TileFormat, name: str) -> None:
        self.module, self.body, self.format, self.name = module, body, format, name
        self.tile_step = format.group_bytes
        self.most_rows = 8 if body.registers >= 32 and body.lanes >= 8 else 4
        # Where bytes are multiplied signed by signed, or 8-bit codes would overflow pairs, codes are taken less 128.
        self.signed = body.dot == "sdot" or (body.dot == "maddubs" and self.highest > 127)
        self.signed = self.signed and self.highest > 127
        self.zero = (128 if format.table else format.zero) - (128 if self.signed else 0)

    @property
    def highest(self) -> int:
        """The largest unsigned factor."""
        return 255 if self.format.table else (1 << self.format.bits) - 1

    def write(self) -> None:
        """All functions of the format; `product_NAME` is the one to call."""
        for rows in range(1, self.most_rows + 1):
            self._rows(rows)
        self.write_piece()

    def write_piece(self) -> None:
        """void product_NAME(arguments, piece): some tiles and some rows, so that threads share the work."""
        f = self.module.function(f"product_{self.name}", [("arguments", "ptr"), ("piece", "i64")])
        word = [f.load(f["arguments"], "i64", 8 * index, 8) for index in range(ARGUMENTS)]

        def pointer(index: int) -> Value:
            return f.load(f["arguments"], "ptr", 8 * index, 8)

        rows = f.convert(f.load(pointer(ROWS), "i32", 0, 4), "sext", "i64")
        row_pieces = (rows + word[ROWS_PER_PIECE] - 1) // word[ROWS_PER_PIECE]
        first_row = f["piece"] % row_pieces * word[ROWS_PER_PIECE]
        last_row = f.minimum(first_row + word[ROWS_PER_PIECE], rows)
        first_tile = f["piece"] // row_pieces * word[TILES_PER_PIECE]
        tiles = (word[OUTS] + (OUTPUTS - 1)) // OUTPUTS
        last_tile = f.minimum(first_tile + word[TILES_PER_PIECE], tiles)
        tile_bytes = word[GROUPS] * self.tile_step
        x, weights, out, bias, before = (pointer(index) for index in (X, TILES, OUT, BIAS, BEFORE))
        whole = first_row + (last_row - first_row) // self.most_rows * self.most_rows
        with f.loop(first_tile, last_tile) as tile:
            column = tile.index * OUTPUTS
            valid = f.minimum(word[OUTS] - column, OUTPUTS)
            here = f.at(weights, tile.index * tile_bytes)

            def call(count: int, row: Value, here: Value = here, column: Value = column, valid: Value = valid) -> None:
                place = (row * word[OUT_STRIDE] + column) * 4
                f.call(
                    f"rows_{self.name}_{count}",
                    "void",
                    f.at(x, row * word[X_STRIDE]),
                    word[X_STRIDE],
                    here,
                    word[GROUPS],
                    f.at(out, place),
                    word[OUT_STRIDE] * 4,
                    valid,
                    offset_or_null(f, bias, column * 4),
                    offset_or_null(f, before, place),
                )

            with f.loop(first_row, whole, self.most_rows) as row:
                call(self.most_rows, row.index)
            left = last_row - whole
            for count in range(1, self.most_rows):
                with f.when(f.compare("eq", left, count)):
                    call(count, whole)
        f.ret()

    def rows_function(self, rows: int) -> Function:
        """void rows_NAME_N(x, its stride, tile, groups, out, its stride, valid outputs, bias, before)."""
        arguments = [("x", "ptr"), ("xs", "i64"), ("w", "ptr"), ("n", "i64"), ("out", "ptr"), ("os", "i64")]
        arguments += [("valid", "i64"), ("bias", "ptr"), ("before", "ptr")]
        f = self.module.function(f"rows_{self.name}_{rows}", arguments)
        f.linkage = "internal"
        return f

    def _rows(self, rows: int) -> None:
        """So many rows with one tile."""
        f, lanes = self.rows_function(rows), self.body.lanes
        xs = [f.at(f["x"], f["xs"] * row) if row else f["x"] for row in range(rows)]
        zeros = [f.constant(0.0, f"<{lanes} x float>")] * rows
        with f.loop(0, OUTPUTS // lanes) as half:
            with f.loop(0, f["n"], carry=zeros) as group:
                start = f.at(f["w"], group.index * self.format.group_bytes)
                record = group.index * (self.format.group // BLOCK * RECORD)
                here = [f.at(x, record) for x in xs]
                group.next = self._group(f, start, half.index, here, group.carried)
            self.finish(f, group.result, half.index)
        f.ret()

    def _group(self, f: Function, start: Value, half: Value, xs: list[Value], sums: list[Value]) -> list[Value]:
        """Adds one group of inputs to the sums of all rows."""
        format, sums = self.format, list(sums)
        scale = self._floats(f, start, half, 0)
        least = self._floats(f, start, half, format.minimum_at()) if format.minimum else None
        blocks = format.group // BLOCK
        if blocks == 1:
            return self._block(f, start, f.at(start, format.header), half, xs, sums, scale, least)
        with f.loop(0, blocks, carry=sums) as block:
            at = block.index * RECORD
            factors = f.at(start, block.index * (OUTPUTS * BLOCK // format.part if format.part <= BLOCK else 0))
            codes = f.at(start, block.index * format.block_bytes + format.header)
            here = [f.at(x, at) for x in xs]
            block.next = self._block(f, factors, codes, half, here, block.carried, scale, least)
        return block.result

    def _block(
        self,
        f: Function,
        factors: Value,
        codes_at: Value,
        half: Value,
        xs: list[Value],
        sums: list[Value],
        scale: Value,
        least: Value | None,
    ) -> list[Value]:
        """Adds 32 inputs; the inner factors of the block stand where those of the group's first stand of `factors`."""
        format, sums = self.format, list(sums)
        for line in range(0, format.block_bytes, VECTOR):
            f.prefetch(codes_at, AHEAD + line)
        codes = self._codes(f, codes_at, half)
        parts = max(1, BLOCK // format.part)
        scales, lows = [scale] * parts, [] if least is None else [least] * parts
        if format.inner:
            here = f.at(factors, half * self.body.lanes)
            for part in range(parts):
                scales[part] = scale * self._bytes(f, here, format.inner_at(part))
                if least is not None:
                    lows[part] = least * self._bytes(f, here, format.inner_minimum_at(part), "zext")
        count = len(codes) // parts
        sum_at, scaled_at = ((SUM,), (SUM_SCALED,)) if parts == 1 else (HALF_SUM, HALF_SUM_SCALED)
        for row, x in enumerate(xs):
            found: Value | None = None
            for part in range(parts):
                whole = self._dot(f, codes[count * part : count * (part + 1)], x, 4 * count * part, sum_at[part])
                number = f.convert(whole, "sitofp", "float")
                found = number * scales[part] if found is None else f.fma(number, scales[part], found)
            assert found is not None
            sums[row] = f.fma(found, self._spread(f, x, DELTA, "float"), sums[row])
            for part, low in enumerate(lows):
                sums[row] = f.fma(low, self._spread(f, x, scaled_at[part], "float"), sums[row])
        return sums

    def _floats(self, f: Function, start: Value, half: Value, at: int) -> Value:
        """Outer factors of this half of the outputs, as float32."""
        lanes, kind = self.body.lanes, self.format.outer
        here = f.at(start, half * (lanes * BYTES[kind]))
        if kind == "float":
            return f.load(here, f"<{lanes} x float>", at)
        return sixteen_bits(f, self.body, f.at(here, at), kind)

    def _bytes(self, f: Function, here: Value, at: int, how: str = "sext") -> Value:
        """Inner factors as float32."""
        found = f.load(here, f"<{self.body.lanes} x i8>", at)
        return f.convert(f.convert(found, how, "i32"), "sitofp", "float")

    def _codes(self, f: Function, start: Value, half: Value) -> list[Value]:
        """The codes of 32 inputs: eight vectors <lanes x i32> of four inputs for each output."""
        lanes, bits = self.body.lanes, self.format.bits
        here, at = f.at(start, half * (4 * lanes)), 0
        kind = f"<{lanes} x i32>"
        found: list[Value | None] = [None] * 8
        shift = 0
        for width in PLANES[bits]:
            loads = [f.load(here, kind, at + VECTOR * index) for index in range(width)]
            at += VECTOR * width
            for vector in range(8):
                packed = loads[vector * width // 8]
                begin = vector * width % 8  # the code's first bit in its byte
                mask = ((1 << width) - 1) << shift
                if begin > shift:
                    packed = packed >> (begin - shift)
                elif begin < shift:
                    packed = packed << (shift - begin)
                if width < 8:
                    packed = packed & (mask * 0x01010101)
                before = found[vector]
                found[vector] = packed if before is None else before | packed
            shift += width
        codes = [code for code in found if code is not None]
        if self.format.table:
            codes = [self._look_up(f, code) for code in codes]
        if self.signed:
            codes = [code ^ f.constant(-0x7F7F7F80, kind) for code in codes]  # 0x80 in every byte
        return codes

    def _look_up(self, f: Function, code: Value) -> Value:
        """table[code] + 128, byte by byte."""
        lanes = self.body.lanes
        size = 4 * lanes
        entries = [(entry + 128) & 255 for entry in self.format.table] + [0] * (16 - len(self.format.table))
        index, kind = f.bitcast(code, f"<{size} x i8>"), f"<{size} x i8>"
        if self.body.triple == "x86_64":
            name = "llvm.x86.avx512.pshuf.b.512" if lanes == 16 else "llvm.x86.avx2.pshuf.b"
            found = f.intrinsic(name, kind, f.vector(entries * (size // 16), "i8"), index)
        elif self.body.triple == "aarch64":
            found = f.intrinsic("llvm.aarch64.neon.tbl1.v16i8", kind, f.vector(entries, "i8"), index)
        else:
            found = f.constant(entries[0], kind)
            for number, entry in enumerate(entries[1:], 1):
                found = f.select(f.compare("eq", index, number), f.constant(entry, kind), found)
        return f.bitcast(found, f"<{lanes} x i32>")

    def _spread(self, f: Function, x: Value, at: int, kind: str) -> Value:
        """One number of the activations in every lane."""
        return f.splat(f.load(x, kind, at, 4), self.body.lanes)

    def _dot(self, f: Function, codes: Sequence[Value], x: Value, at: int, sum_at: int) -> Value:
        """Σ (code − zero) · activation over four inputs of each vector: exact whole numbers <lanes x i32>."""
        lanes, body = self.body.lanes, self.body
        kind, size = f"<{lanes} x i32>", 4 * lanes
        total = f.constant(0, kind)
        if self.zero:
            negated = self._spread(f, x, sum_at, "i32")
            total = negated * self.zero if self.zero & (self.zero - 1) else negated << (self.zero.bit_length() - 1)
        rows = [self._spread(f, x, at + 4 * index, "i32") for index in range(len(codes))]
        if body.dot == "vnni":
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            for code, row in zip(codes, rows, strict=True):
                total = f.intrinsic(name, kind, total, code, row)
            return total
        if body.dot == "maddubs":
            return self._pairs(f, codes, rows, total)
        if body.dot in ("usdot", "sdot"):
            unsigned = body.dot == "usdot"
            name = "llvm.aarch64.neon.usdot.v4i32.v16i8" if unsigned else "llvm.aarch64.neon.sdot.v4i32.v16i8"
            for code, row in zip(codes, rows, strict=True):
                left, right = f.bitcast(code, f"<{size} x i8>"), f.bitcast(row, f"<{size} x i8>")
                total = f.intrinsic(name, kind, total, left, right)
            return total
        for code, row in zip(codes, rows, strict=True):
            left = f.convert(f.bitcast(code, f"<{size} x i8>"), "sext" if self.signed else "zext", "i32")
            product = left * f.convert(f.bitcast(row, f"<{size} x i8>"), "sext", "i32")
            for byte in range(4):
                total = total + f.shuffle(product, None, range(byte, size, 4))
        return total

    def _pairs(self, f: Function, codes: Sequence[Value], rows: Sequence[Value], total: Value) -> Value:
        """Pairs of products in 16 bits, as many of them added there as fit, then in 32."""
        lanes = self.body.lanes
        small, kind = f"<{4 * lanes} x i8>", f"<{2 * lanes} x i16>"
        highest = 128 if self.signed else self.highest
        fits = max(1, 32767 // (highest * 127 * 2))
        ones = f.constant(1, kind)
        for begin in range(0, len(codes), fits):
            pair = None
            for code, row in zip(codes[begin : begin + fits], rows[begin : begin + fits], strict=True):
                left, right = f.bitcast(code, small), f.bitcast(row, small)
                if self.signed:  # |code| · (activation with the code's sign)
                    right = f.intrinsic("llvm.x86.avx2.psign.b", small, right, left)
                    left = f.select(f.compare("slt", left, 0), f.constant(0, small) - left, left)
                found = f.intrinsic("llvm.x86.avx2.pmadd.ub.sw", kind, left, right)
                pair = found if pair is None else pair + found
            assert pair is not None
            total = total + f.intrinsic("llvm.x86.avx2.pmadd.wd", f"<{lanes} x i32>", pair, ones)
        return total

    def finish(self, f: Function, sums: list[Value], half: Value) -> None:
        """Adds the bias and what was there before, and stores as many outputs as there are."""
        lanes = self.body.lanes
        first = half * (4 * lanes)
        left = f["valid"] - half * lanes
        kind = f"<{lanes} x float>"
        rooms = [f.room(4 * lanes) for _ in sums]
        whole, some, after = f.fresh("whole"), f.fresh("some"), f.fresh("stored")
        f.branch(f.compare("sge", left, lanes), whole, some)
        f.block(whole)
        results = []
        for row, found in enumerate(sums):
            place = f["os"] * row
            found = self._added(f, found, f["bias"], first, kind)
            results.append(self._added(f, found, f["before"], place + first, kind))
        for row, found in enumerate(results):
            f.store(found, f.at(f["out"], f["os"] * row), first)
        f.jump(after)
        f.block(some)
        for row, found in enumerate(sums):
            f.store(found, rooms[row])
        with f.loop(0, left) as lane:
            here = lane.index * 4 + first
            for row, room in enumerate(rooms):
                one = f.load(room, "float", lane.index * 4, 4)
                one = self._added(f, one, f["bias"], here, "float")
                one = self._added(f, one, f["before"], f["os"] * row + here, "float")
                f.store(one, f.at(f["out"], f["os"] * row), here, 4)
        f.jump(after)
        f.block(after)

    def _added(self, f: Function, value: Value, base: Value, at: Value, kind: str) -> Value:
        """value + what stands there; a null pointer adds nothing, not even a zero that would change −0."""
        there, after = f.fresh("there"), f.fresh("added")
        came = f._label
        f.branch(f.compare("eq", base, Value(f, "ptr", "null")), after, there)
        f.block(there)
        more = value + f.load(base, kind, at, 4)
        f.jump(after)
        f.block(after)
        return f.emit(kind, f"phi {kind} [ {value.name}, %{came} ], [ {more.name}, %{there} ]")


class FloatProducts:
    """Products of float32 activations with weights as floats; each fourth input goes to the same of four sums."""

    SUMS = 4

    def __init__(self, module: Module, body: Body, kind: str) -> None:
        self.module, self.body, self.kind = module, body, kind
        self.most_rows = 4 if body.registers >= 32 and body.lanes >= 8 else 2

    def write(self) -> None:
        """`product_KIND` is called as the products of few bits are; `groups` is the number of inputs."""
        shared = ProductWriter(self.module, self.body, TileFormat(8, BLOCK, BLOCK, "half", False, False), self.kind)
        shared.most_rows, shared.tile_step = self.most_rows, OUTPUTS * BYTES[self.kind]
        for rows in range(1, self.most_rows + 1):
            self._rows(rows, shared)
        shared.write_piece()

    def _rows(self, rows: int, shared: ProductWriter) -> None:
        f = shared.rows_function(rows)
        lanes = self.body.lanes
        xs = [f.at(f["x"], f["xs"] * row) if row else f["x"] for row in range(rows)]
        zeros = [f.constant(0.0, f"<{lanes} x float>")] * (rows * self.SUMS)
        whole = f["n"] & -self.SUMS
        with f.loop(0, OUTPUTS // lanes) as half:
            with f.loop(0, whole, self.SUMS, zeros) as at:
                sums = list(at.carried)
                for step in range(self.SUMS):
                    self._input(f, at.index + step, half.index, xs, sums, step)
                at.next = sums
            with f.loop(whole, f["n"], 1, at.result) as rest:
                sums = list(rest.carried)
                self._input(f, rest.index, half.index, xs, sums, 0)
                rest.next = sums
            found = []
            for row in range(rows):
                a, b, c, d = rest.result[row * self.SUMS : (row + 1) * self.SUMS]
                found.append((a + b) + (c + d))
            shared.finish(f, found, half.index)
        f.ret()

    def _input(self, f: Function, index: Value, half: Value, xs: list[Value], sums: list[Value], step: int) -> None:
        """One input of every row, to the sum of its step."""
        lanes, size = self.body.lanes, BYTES[self.kind]
        here = f.at(f["w"], (index * OUTPUTS + half * lanes) * size)
        if self.kind == "float":
            weight = f.load(here, f"<{lanes} x float>", 0, 4)
        else:
            weight = sixteen_bits(f, self.body, here, self.kind)
        for row, x in enumerate(xs):
            place = row * self.SUMS + step
            sums[place] = f.fma(weight, f.splat(f.load(x, "float", index * 4, 4), lanes), sums[place])


def sixteen_bits(f: Function, body: Body, here: Value, kind: str) -> Value:
    """float16 or bfloat16 numbers as float32."""
    lanes = body.lanes
    if kind == "half" and body.needs:
        return f.convert(f.load(here, f"<{lanes} x half>"), "fpext", "float")
    bits = f.load(here, f"<{lanes} x i16>")
    if kind == "half":  # no instruction, and no library at hand
        return half_to_float(f, bits)
    return f.bitcast(f.convert(bits, "zext", "i32") << 16, f"<{lanes} x float>")


def half_to_float(f: Function, bits: Value) -> Value:
    """float16 numbers given as their bits."""
    wide = f.convert(bits, "zext", "i32")
    size = (wide & 0x7FFF) << 13
    scaled = f.bitcast(size, f"<{bits.lanes} x float>") * 2.0**112  # numbers below the normal ones come out right too
    beyond = f.select(f.compare("uge", wide & 0x7FFF, 0x7C00), size | 0x7F800000, f.bitcast(scaled, size.type))
    return f.bitcast(beyond | ((wide & 0x8000) << 16), f"<{bits.lanes} x float>")


def offset_or_null(f: Function, base: Value, offset: Value) -> Value:
    """base + offset, or null where the base is null."""
    return f.select(f.compare("eq", base, Value(f, "ptr", "null")), base, f.at(base, offset))


def write_rounding(module: Module, body: Body) -> None:
    """void round_row(row of float32, inputs, records): each block of 32 gets a scale and whole numbers up to 127.

    Inputs beyond a whole number of blocks count as zeros; `inputs` of them are read.
    """
    f = module.function("round_row", [("x", "ptr"), ("n", "i64"), ("out", "ptr")])
    lanes = min(body.lanes, 16)
    room = f.room(4 * BLOCK)
    with f.loop(0, (f["n"] + (BLOCK - 1)) // BLOCK) as block:
        source = f.at(f["x"], block.index * (4 * BLOCK))
        left = f["n"] - block.index * BLOCK
        with f.when(f.compare("slt", left, BLOCK)):
            for index in range(BLOCK // lanes):
                f.store(f.constant(0.0, f"<{lanes} x float>"), room, 4 * lanes * index)
            with f.loop(0, left) as rest:
                f.store(f.load(source, "float", rest.index * 4, 4), room, rest.index * 4, 4)
        source = f.select(f.compare("slt", left, BLOCK), room, source)
        round_block(f, source, f.at(f["out"], block.index * RECORD), lanes)
    f.ret()


def round_block(f: Function, source: Value, out: Value, lanes: int) -> None:
    """One block: 32 float32 at `source` to a record at `out`."""
    kind = f"<{lanes} x float>"
    values = [f.load(source, kind, 4 * lanes * index) for index in range(BLOCK // lanes)]
    # Sizes compare as whole numbers, and what is not a number is the largest of all: it makes the block not a number.
    sizes = [f.bitcast(value, f"<{lanes} x i32>") & 0x7FFFFFFF for value in values]
    top = sizes[0]
    for size in sizes[1:]:
        top = f.maximum(top, size)
    width = lanes
    while width > 1:
        width //= 2
        top = f.maximum(f.shuffle(top, None, range(width)), f.shuffle(top, None, range(width, 2 * width)))
    largest = f.bitcast(f.extract(top, 0), "float")
    largest = f.select(f.compare("une", largest, 0.0), largest, f.constant(1.0, "float"))
    delta = largest * (1 / 127)
    inverse = f.splat(f.constant(127.0, "float") / largest, lanes)
    sums: list[Value] = []
    for index, value in enumerate(values):
        near = f.unary("rint", value * inverse)
        whole = f.intrinsic(f"llvm.fptosi.sat.v{lanes}i32.v{lanes}f32", f"<{lanes} x i32>", near)
        f.store(f.convert(whole, "trunc", "i8"), out, lanes * index)
        sums.append(whole)
    halves = []
    for sixteen in (sums[: len(sums) // 2], sums[len(sums) // 2 :]):
        total = sixteen[0]
        for more in sixteen[1:]:
            total = total + more
        width = lanes
        while width > 1:
            width //= 2
            total = f.shuffle(total, None, range(width)) + f.shuffle(total, None, range(width, 2 * width))
        halves.append(f.constant(0, "i32") - f.extract(total, 0))
    both = halves[0] + halves[1]
    f.store(delta, out, DELTA, 4)
    f.store(f.convert(both, "sitofp", "float") * delta, out, SUM_SCALED, 4)
    f.store(both, out, SUM, 4)
    f.store(f.constant(0, "i32"), out, SUM + 4, 4)
    for part, half in enumerate(halves):
        f.store(half, out, HALF_SUM[part], 4)
        f.store(f.convert(half, "sitofp", "float") * delta, out, HALF_SUM_SCALED[part], 4)
