"""Attention over pages of keys and values, and what comes before it, written as LLVM IR.

A row reads its own keys in order: page by page with a running maximum inside a group of 256 keys, groups merged in
order by one formula. Rows of a sequence share the loads of a page, and do nothing else together: a row has the same
bits alone, in a prompt of any length, and beside drafts.
"""

from __future__ import annotations

import math

from forerun.kernels.cpu.emit import WIDE, Function, Module, Value
from forerun.kernels.cpu.loops import FLOAT, Words
from forerun.kernels.cpu.machine import Body

GROUP = 256  # keys between two merges
ITEMS = 64  # pairs of a row and a head that one piece has at most
TOGETHER = 4  # of them that share the loads of a page
# An item: where its query is, the keys it sees, then its running maxima, sums and outputs: of the group, and of all.
QUERY, BEGIN, STOP, MAXIMUM, SUM, ALL_MAXIMUM, ALL_SUM, OUTPUTS = 0, 8, 16, 24, 28, 32, 36, 64
LOWEST_FLOAT = "0xFFF0000000000000"  # −∞

ATTEND = (
    *("tiles", "x", "xs", "out", "os", "kv_heads", "shared", "scale", "softcap", "window"),
    *("owner", "position", "stop", "first", "table", "table_stride", "keys", "values"),
)
ROTATE = (
    *("rows", "per_piece", "x", "xs", "heads", "kv_heads", "size", "half", "cos", "sin", "turn", "owner", "position"),
    *("table", "table_stride", "keys", "values", "page", "query_norm", "key_norm", "value_norm", "eps"),
)


def item_bytes(size: int) -> int:
    """Of one pair of a row and a head."""
    return OUTPUTS + 2 * 4 * size + -(2 * 4 * size) % 64


def name_of(size: int, page: int) -> str:
    """The function for heads of a size and pages of a length."""
    return f"attend_{size}_{page}"


class Attention:
    """Writes the functions for heads of one size and pages of one length."""

    def __init__(self, module: Module, body: Body, size: int, page: int) -> None:
        self.module, self.size, self.page = module, size, page
        self.lanes = min(WIDE, page)
        wide = body.registers >= 32 and body.lanes >= 16
        self.key_vectors = min(4 if wide else 1, page // self.lanes)  # that are summed side by side
        self.column_lanes = math.gcd(WIDE, size)
        vectors = size // self.column_lanes
        self.value_vectors = next(n for n in ((4, 3, 2, 1) if wide else (2, 1)) if vectors % n == 0)
        self.name = name_of(size, page)

    def write(self) -> None:
        """void attend_SIZE_PAGE(arguments, piece)."""
        for count in range(1, TOGETHER + 1):
            self._page(count)
        self._merge()
        self._piece()

    def _piece(self) -> None:
        """A tile, which is a few rows of one sequence, with the query heads that share a key head."""
        f = self.module.function(self.name, [("arguments", "ptr"), ("piece", "i64")])
        word, size = Words(f, ATTEND), self.size
        kv_heads, shared = word("kv_heads"), word("shared")
        tile = f.at(word.pointer("tiles"), f["piece"] // kv_heads * 8)
        head = f["piece"] % kv_heads
        first, count = (f.convert(f.load(tile, "i32", at, 4), "sext", "i64") for at in (0, 4))
        items = count * shared
        bytes_each = item_bytes(size)
        room = f.room(bytes_each * ITEMS)
        position, stop, window = word.pointer("position"), word.pointer("stop"), word("window")

        def number(base: Value, index: Value) -> Value:
            return f.convert(f.load(base, "i32", index * 4, 4), "sext", "i64")

        sequence = number(word.pointer("owner"), first)
        earliest = number(word.pointer("first"), sequence)
        with f.loop(0, items) as each:
            item, row = f.at(room, each.index * bytes_each), first + each.index // shared
            column = (head * shared + each.index % shared) * size
            query = f.at(word.pointer("x"), row * word("xs") + column * 4)
            at = number(position, row) + 1
            begin = f.maximum(at - window, 0)
            begin = f.maximum(f.select(f.compare("sgt", window, 0), begin, f.constant(0)), earliest)
            end = f.select(f.compare("sgt", window, 0), number(stop, row), at)
            f.store(query, item, QUERY, 8)
            f.store(begin, item, BEGIN, 8)
            f.store(end, item, STOP, 8)
            nothing = Value(f, FLOAT, LOWEST_FLOAT)
            for maximum in (MAXIMUM, ALL_MAXIMUM):
                f.store(nothing, item, maximum, 4)
            f.store(f.constant(0.0, FLOAT), item, SUM, 4)
            f.store(f.constant(0.0, FLOAT), item, ALL_SUM, 4)
            with f.loop(0, 2 * size) as column_index:
                f.store(f.constant(0.0, FLOAT), item, column_index.index * 4 + OUTPUTS, 4)
        # Positions of a tile ascend, so its first row begins first; an image's rows may all end with the last of them.
        first_page = f.load(room, "i64", BEGIN, 8) // self.page
        with f.loop(0, items, carry=[f.constant(0)]) as each:
            each.next = [f.maximum(each.carried[0], f.load(room, "i64", each.index * bytes_each + STOP, 8))]
        last = (each.result[0] + (self.page - 1)) // self.page
        table = f.load(word.pointer("table"), "ptr", 0, 8)
        entries = f.at(table, sequence * f.load(word.pointer("table_stride"), "i64", 0, 8) * 4)
        page_bytes = 4 * size * self.page
        whole = items // TOGETHER * TOGETHER
        with f.loop(first_page, last) as page:
            start = page.index * self.page
            fresh = f.compare("eq", start % GROUP, 0) & f.compare("sgt", page.index, first_page)
            with f.when(fresh), f.loop(0, items) as each:
                f.call(f"merge_{size}_{self.page}", "void", f.at(room, each.index * bytes_each))
            number_of_page = f.convert(f.load(entries, "i32", page.index * 4, 4), "sext", "i64")
            offset = (number_of_page * kv_heads + head) * page_bytes
            keys, values = f.at(word.pointer("keys"), offset), f.at(word.pointer("values"), offset)
            numbers = [keys, values, start, word.real("scale"), word.real("softcap")]
            with f.loop(0, whole, TOGETHER) as each:
                here = f.at(room, each.index * bytes_each)
                f.call(f"page_{size}_{self.page}_{TOGETHER}", "void", here, *numbers)
            left = items - whole
            for few in range(1, TOGETHER):
                with f.when(f.compare("eq", left, few)):
                    f.call(f"page_{size}_{self.page}_{few}", "void", f.at(room, whole * bytes_each), *numbers)
        kind = f"<{self.column_lanes} x float>"
        with f.loop(0, items) as each:
            item, row = f.at(room, each.index * bytes_each), first + each.index // shared
            f.call(f"merge_{size}_{self.page}", "void", item)
            column = (head * shared + each.index % shared) * size
            out = f.at(word.pointer("out"), row * word("os") + column * 4)
            total = f.splat(f.load(item, FLOAT, ALL_SUM, 4), self.column_lanes)
            for place in range(0, 4 * size, 4 * self.column_lanes):
                f.store(f.load(item, kind, OUTPUTS + 4 * size + place, 4) / total, out, place, 4)
        f.ret()

    def _merge(self) -> None:
        """void merge(item): the group joins what came before it, and a new one begins."""
        size = self.size
        f = self.module.function(f"merge_{size}_{self.page}", [("item", "ptr")])
        f.linkage = "internal"
        item = f["item"]
        before, here = f.load(item, FLOAT, ALL_MAXIMUM, 4), f.load(item, FLOAT, MAXIMUM, 4)
        top = f.select(f.compare("ogt", here, before), here, before)
        pair = f.emit("<2 x float>", f"insertelement <2 x float> poison, float {(before - top).name}, i32 0")
        pair = f.emit("<2 x float>", f"insertelement <2 x float> {pair.name}, float {(here - top).name}, i32 1")
        factors = f.exponential(pair)
        old, new = f.extract(factors, 0), f.extract(factors, 1)
        f.store(top, item, ALL_MAXIMUM, 4)
        f.store(Value(f, FLOAT, LOWEST_FLOAT), item, MAXIMUM, 4)
        total = f.fma(f.load(item, FLOAT, ALL_SUM, 4), old, f.load(item, FLOAT, SUM, 4) * new)
        f.store(total, item, ALL_SUM, 4)
        f.store(f.constant(0.0, FLOAT), item, SUM, 4)
        kind = f"<{self.column_lanes} x float>"
        olds, news = f.splat(old, self.column_lanes), f.splat(new, self.column_lanes)
        for at in range(OUTPUTS, OUTPUTS + 4 * size, 4 * self.column_lanes):
            mine = f.load(item, kind, at, 4) * news
            f.store(f.fma(f.load(item, kind, at + 4 * size, 4), olds, mine), item, at + 4 * size, 4)
            f.store(f.constant(0.0, kind), item, at, 4)
        f.ret()

    def _page(self, count: int) -> None:
        """void page(items, keys [size, page], values [page, size], first key, scale, softcap) for so many items."""
        size, page, lanes = self.size, self.page, self.lanes
        arguments = [("items", "ptr"), ("keys", "ptr"), ("values", "ptr"), ("start", "i64")]
        f = self.module.function(f"page_{size}_{page}_{count}", [*arguments, ("scale", FLOAT), ("cap", FLOAT)])
        f.linkage = "internal"
        items = [f.at(f["items"], item_bytes(size) * index) for index in range(count)]
        scores = self._scores(f, items)
        weights = f.room(4 * page * count)
        vectors = page // lanes
        shrinks = []
        places = [f.vector(range(lanes * index, lanes * (index + 1)), "i32") for index in range(vectors)]
        first, last = f.constant(page), f.constant(0)
        for index, item in enumerate(items):
            begin = f.minimum(f.maximum(f.load(item, "i64", BEGIN, 8) - f["start"], 0), page)
            stop = f.minimum(f.maximum(f.load(item, "i64", STOP, 8) - f["start"], 0), page)
            first, last = f.minimum(first, begin), f.maximum(last, stop)
            low, high = (f.splat(f.convert(bound, "trunc", "i32"), lanes) for bound in (begin, stop))
            seen = [f.compare("sge", place, low) & f.compare("slt", place, high) for place in places]
            nothing = f.vector([LOWEST_FLOAT] * lanes, FLOAT)
            own = [f.select(see, score, nothing) for see, score in zip(seen, scores[index], strict=True)]
            top = own[0]
            for more in own[1:]:
                top = f.select(f.compare("ogt", more, top), more, top)
            highest = f.fold(top, lambda a, b: f.select(f.compare("ogt", a, b), a, b))
            before = f.load(item, FLOAT, MAXIMUM, 4)
            highest = f.select(f.compare("ogt", highest, before), highest, before)
            f.store(highest, item, MAXIMUM, 4)
            wide = f.splat(highest, lanes)
            total = None
            for vector, (see, score) in enumerate(zip(seen, own, strict=True)):
                weight = f.select(see, f.exponential(score - wide), f.constant(0.0, wide.type))
                f.store(weight, weights, 4 * (page * index + lanes * vector), 4)
                total = weight if total is None else total + weight
            assert total is not None
            shrink = f.extract(f.exponential(f.splat(before - highest, 2)), 0)
            shrinks.append(shrink)
            sum_here = f.fold(total, lambda a, b: a + b)
            f.store(f.fma(f.load(item, FLOAT, SUM, 4), shrink, sum_here), item, SUM, 4)
        self._gather(f, items, weights, shrinks, first, last)
        f.ret()

    def _scores(self, f: Function, items: list[Value]) -> list[list[Value]]:
        """Query · key, scaled, for all keys of the page: by item, vectors of keys."""
        size, page, lanes, beside = self.size, self.page, self.lanes, self.key_vectors
        kind = f"<{lanes} x float>"
        queries = [f.load(item, "ptr", QUERY, 8) for item in items]
        found: list[list[Value]] = [[] for _ in items]
        step = 4 if size % 4 == 0 else 1
        for block in range(0, page // lanes, beside):
            zeros = [f.constant(0.0, kind)] * (beside * len(items))
            with f.loop(0, size, step, zeros) as at:
                sums = list(at.carried)
                for more in range(step):
                    keys = f.at(f["keys"], (at.index + more) * (4 * page))
                    lines = [f.load(keys, kind, 4 * lanes * (block + index), 4) for index in range(beside)]
                    for number, query in enumerate(queries):
                        factor = f.splat(f.load(query, FLOAT, (at.index + more) * 4, 4), lanes)
                        for index, line in enumerate(lines):
                            place = number * beside + index
                            sums[place] = f.fma(factor, line, sums[place])
                at.next = sums
            for number in range(len(items)):
                found[number] += at.result[number * beside : (number + 1) * beside]
        scale, cap = f.splat(f["scale"], lanes), f.splat(f["cap"], lanes)
        capped = f.splat(f.compare("ogt", f["cap"], 0.0), lanes)
        for row in found:
            for index, score in enumerate(row):
                score = score * scale
                e = f.exponential(score * 2.0 / cap)
                bounded = cap * (f.constant(1.0, kind) - f.constant(2.0, kind) / (e + 1.0))
                row[index] = f.select(capped, bounded, score)
        return found

    def _gather(
        self, f: Function, items: list[Value], weights: Value, shrinks: list[Value], first: Value, last: Value
    ) -> None:
        """Outputs so far shrink, and the values of the page join them in the order of the keys."""
        size, page, lanes, beside = self.size, self.page, self.column_lanes, self.value_vectors
        kind = f"<{lanes} x float>"
        for block in range(0, size // lanes, beside):
            places = [OUTPUTS + 4 * lanes * (block + index) for index in range(beside)]
            sums = []
            for item, shrink in zip(items, shrinks, strict=True):
                factor = f.splat(shrink, lanes)
                sums += [f.load(item, kind, place, 4) * factor for place in places]
            with f.loop(first, last, 1, sums) as key:
                line = f.at(f["values"], key.index * (4 * size))
                values = [f.load(line, kind, 4 * lanes * (block + index), 4) for index in range(beside)]
                following = []
                for number in range(len(items)):
                    weight = f.splat(f.load(weights, FLOAT, key.index * 4 + 4 * page * number, 4), lanes)
                    for index, value in enumerate(values):
                        following.append(f.fma(weight, value, key.carried[number * beside + index]))
                key.next = following
            for number, item in enumerate(items):
                for index, place in enumerate(places):
                    f.store(key.result[number * beside + index], item, place, 4)


def write_rotation(module: Module) -> None:
    """void rotate(arguments, piece): norms of heads, rotary embedding, keys and values to their pages."""
    f = module.function("rotate", [("arguments", "ptr"), ("piece", "i64")])
    word = Words(f, ROTATE)
    rows = f.convert(f.load(word.pointer("rows"), "i32", 0, 4), "sext", "i64")
    begin = f["piece"] * word("per_piece")
    heads, kv_heads, size, half, page = (word(name) for name in ("heads", "kv_heads", "size", "half", "page"))
    null, eps = Value(f, "ptr", "null"), word.real("eps")
    both = heads + kv_heads
    cos, sin, turn = (f.load(word.pointer(name), "ptr", 0, 8) for name in ("cos", "sin", "turn"))
    with f.loop(begin, f.minimum(begin + word("per_piece"), rows)) as row:
        x = f.at(word.pointer("x"), row.index * word("xs"))
        for name, start, count in (
            ("query_norm", f.constant(0), heads),
            ("key_norm", heads, kv_heads),
            ("value_norm", both, kv_heads),
        ):
            weight = word.pointer(name)
            with f.when(f.compare("ne", weight, null)), f.loop(start, start + count) as head:
                place = f.at(x, head.index * size * 4)
                f.call("rms_row", "void", place, size, weight, eps, null, place)
        position = f.convert(f.load(word.pointer("position"), "i32", row.index * 4, 4), "sext", "i64")
        turns = f.convert(f.load(turn, "i32", row.index * 4, 4), "sext", "i64") * half * 4
        c, s = f.at(cos, turns), f.at(sin, turns)
        with f.loop(0, both) as head:
            left = f.at(x, head.index * size * 4)
            right = f.at(left, half * 4)

            def turned(
                at: Value, mask: Value | None, _: list[Value], left: Value = left, right: Value = right
            ) -> list[Value]:
                kind = f"<{WIDE} x float>"
                a, b = f.load_some(left, kind, at, mask), f.load_some(right, kind, at, mask)
                cosine, sine = f.load_some(c, kind, at, mask), f.load_some(s, kind, at, mask)
                f.store_some(f.fma(a, cosine, f.constant(0.0, kind) - b * sine), left, at, mask)
                f.store_some(f.fma(b, cosine, a * sine), right, at, mask)
                return []

            f.columns(half, turned)
        with f.when(f.compare("sgt", kv_heads, 0)):
            owner = f.convert(f.load(word.pointer("owner"), "i32", row.index * 4, 4), "sext", "i64")
            table, stride = (
                f.load(word.pointer("table"), "ptr", 0, 8),
                f.load(word.pointer("table_stride"), "i64", 0, 8),
            )
            entry = f.load(table, "i32", (owner * stride + position // page) * 4, 4)
            slot = position % page
            base = f.convert(entry, "sext", "i64") * kv_heads
            with f.loop(0, kv_heads) as head:
                target = (base + head.index) * size * page
                key, value = (f.at(x, (start + head.index) * size * 4) for start in (heads, both))
                keys = f.at(word.pointer("keys"), (target + slot) * 4)
                values = f.at(word.pointer("values"), (target + slot * size) * 4)
                with f.loop(0, size) as column:
                    f.store(f.load(key, FLOAT, column.index * 4, 4), keys, column.index * page * 4, 4)
                    f.store(f.load(value, FLOAT, column.index * 4, 4), values, column.index * 4, 4)
    f.ret()
