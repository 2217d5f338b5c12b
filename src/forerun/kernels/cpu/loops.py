"""The small loops between products, written as LLVM IR: norms, activations, rotations, copies.

Every loop is void NAME(arguments, piece) and works on the rows of its piece; a row sees nothing of other rows. Columns
go sixteen at a time on every machine, sums are folded in one tree, and nothing is left to the compiler's taste, so the
bits are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from forerun.kernels.cpu.emit import WIDE, Function, Module, Value

FLOAT, VECTOR = "float", f"<{WIDE} x float>"
STEEP, CUBIC = 1.5957691216057308, 0.044715  # of gelu in the form with tanh: x / (1 + e^(−2u)), u = √(2/π)(x + c·x³)


class Words:
    """The arguments of a loop by name: 64-bit words, of which `rows` is the address of the number of rows."""

    def __init__(self, f: Function, names: Sequence[str]) -> None:
        self.f, self.names = f, list(names)

    def __call__(self, name: str, kind: str = "i64") -> Value:
        return self.f.load(self.f["arguments"], kind, 8 * self.names.index(name), 8)

    def pointer(self, name: str) -> Value:
        return self(name, "ptr")

    def real(self, name: str) -> Value:
        """A float32 in the lower half of its word."""
        return self(name, FLOAT)


ARGUMENTS: dict[str, tuple[str, ...]] = {
    "round": ("rows", "per_piece", "x", "xs", "n", "records", "rs"),
    "norm": ("rows", "per_piece", "x", "xs", "n", "weight", "eps", "out", "os", "records", "rs"),
    "silu": ("rows", "per_piece", "x", "xs", "up", "us", "n", "out", "os", "records", "rs"),
    "gelu": ("rows", "per_piece", "x", "xs", "up", "us", "n", "out", "os", "records", "rs"),
    "add_norm": (
        *("rows", "per_piece", "x", "xs", "n", "weight", "eps", "before", "bs", "factor", "out", "os"),
        *("joined", "js", "join_norm", "joined_norm"),
    ),
    "gather": ("rows", "per_piece", "x", "xs", "n", "which", "out", "os"),
    "copy": ("rows", "per_piece", "x", "xs", "n", "out", "os"),
    "sum": ("rows", "per_piece", "x", "xs", "other", "ts", "n", "out", "os"),
    "sigmoid": ("rows", "per_piece", "x", "xs", "gate", "gs", "shared", "n", "out", "os"),
    "cap": ("rows", "per_piece", "x", "xs", "n", "cap"),
    "never": ("rows", "per_piece", "x", "xs", "which", "count"),
}


@contextmanager
def loop_over_rows(module: Module, name: str) -> Iterator[tuple[Function, Words, Value]]:
    """The function of a loop: what is written inside runs for every row of a piece."""
    f = module.function(name, [("arguments", "ptr"), ("piece", "i64")])
    word = Words(f, ARGUMENTS[name])
    rows = f.convert(f.load(word.pointer("rows"), "i32", 0, 4), "sext", "i64")
    first = f["piece"] * word("per_piece")
    with f.loop(first, f.minimum(first + word("per_piece"), rows)) as row:
        yield f, word, row.index
    f.ret()


def write_loops(module: Module) -> None:
    """All of them, and what they call."""
    _write_rms(module)
    with loop_over_rows(module, "round") as (f, word, row):
        x = f.at(word.pointer("x"), row * word("xs"))
        f.call("round_row", "void", x, word("n"), f.at(word.pointer("records"), row * word("rs")))
    with loop_over_rows(module, "norm") as (f, word, row):
        x, out = (f.at(word.pointer(name), row * word(stride)) for name, stride in (("x", "xs"), ("out", "os")))
        nothing = Value(f, "ptr", "null")
        f.call("rms_row", "void", x, word("n"), word.pointer("weight"), word.real("eps"), nothing, out)
        _round_where_asked(f, word, row, out)
    for name, inside in (("silu", _silu), ("gelu", _gelu)):
        _write_gated(module, name, inside)
    _write_add_norm(module)
    _write_copies(module)
    _write_sigmoid(module)
    with loop_over_rows(module, "cap") as (f, word, row):
        x, cap = f.at(word.pointer("x"), row * word("xs")), f.splat(word.real("cap"), WIDE)

        def capped(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
            value = f.load_some(x, VECTOR, at, mask)
            e = f.exponential(value * 2.0 / cap)
            one = f.constant(1.0, VECTOR)
            f.store_some(cap * (one - f.constant(2.0, VECTOR) / (e + 1.0)), x, at, mask)
            return []

        f.columns(word("n"), capped)
    with loop_over_rows(module, "never") as (f, word, row):
        x = f.at(word.pointer("x"), row * word("xs"))
        with f.loop(0, word("count")) as each:
            token = f.load(word.pointer("which"), "i64", each.index * 8, 8)
            f.store(Value(f, FLOAT, "0xFFF0000000000000"), x, token * 4, 4)


def _round_where_asked(f: Function, word: Words, row: Value, values: Value) -> None:
    """Records of the row for the products that follow."""
    records = word.pointer("records")
    with f.when(f.compare("ne", records, Value(f, "ptr", "null"))):
        f.call("round_row", "void", values, word("n"), f.at(records, row * word("rs")))


def _write_rms(module: Module) -> None:
    """void rms_row(x, n, weight, eps, added, out): out = x / rms(x) · weight, plus `added` where that is not null."""
    arguments = [("x", "ptr"), ("n", "i64"), ("weight", "ptr"), ("eps", FLOAT), ("added", "ptr"), ("out", "ptr")]
    f = module.function("rms_row", arguments)

    def squares(at: Value, mask: Value | None, sums: list[Value]) -> list[Value]:
        x = f.load_some(f["x"], VECTOR, at, mask)
        return [f.fma(x, x, sums[0])]

    (sums,) = f.columns(f["n"], squares, [f.constant(0.0, VECTOR)])
    mean = f.fold(sums, lambda a, b: a + b) / f.convert(f["n"], "sitofp", FLOAT)
    factor = f.splat(f.constant(1.0, FLOAT) / f.unary("sqrt", mean + f["eps"]), WIDE)

    def scaled(at: Value, mask: Value | None) -> Value:
        return f.load_some(f["x"], VECTOR, at, mask) * factor * f.load_some(f["weight"], VECTOR, at, mask)

    def plain(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
        f.store_some(scaled(at, mask), f["out"], at, mask)
        return []

    def more(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
        f.store_some(scaled(at, mask) + f.load_some(f["added"], VECTOR, at, mask), f["out"], at, mask)
        return []

    alone, both, end = f.fresh("alone"), f.fresh("both"), f.fresh("end")
    f.branch(f.compare("eq", f["added"], Value(f, "ptr", "null")), alone, both)
    for label, body in ((alone, plain), (both, more)):
        f.block(label)
        f.columns(f["n"], body)
        f.jump(end)
    f.block(end)
    f.ret()


def _silu(f: Function, x: Value) -> Value:
    return x / (f.exponential(f.constant(0.0, VECTOR) - x) + 1.0)


def _gelu(f: Function, x: Value) -> Value:
    cube = x * x * x
    u = f.fma(cube, f.constant(CUBIC, VECTOR), x) * -STEEP
    return x / (f.exponential(u) + 1.0)


def _write_gated(module: Module, name: str, inside: Callable[[Function, Value], Value]) -> None:
    """out = activation(x) · up, rounded for the product that follows."""
    with loop_over_rows(module, name) as (f, word, row):
        x, up, out = (
            f.at(word.pointer(each), row * word(stride)) for each, stride in (("x", "xs"), ("up", "us"), ("out", "os"))
        )

        def gated(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
            value = inside(f, f.load_some(x, VECTOR, at, mask)) * f.load_some(up, VECTOR, at, mask)
            f.store_some(value, out, at, mask)
            return []

        f.columns(word("n"), gated)
        _round_where_asked(f, word, row, out)


def _write_add_norm(module: Module) -> None:
    """out = (before + rms_norm(x)) · factor; x is rms_norm(x) + rms_norm(joined) first, where something is joined."""
    with loop_over_rows(module, "add_norm") as (f, word, row):
        x, before, out = (
            f.at(word.pointer(each), row * word(stride))
            for each, stride in (("x", "xs"), ("before", "bs"), ("out", "os"))
        )
        n, eps, null = word("n"), word.real("eps"), Value(f, "ptr", "null")
        joined = word.pointer("joined")
        simple, both, end = f.fresh("simple"), f.fresh("both"), f.fresh("end")
        f.branch(f.compare("eq", joined, null), simple, both)
        f.block(simple)
        f.call("rms_row", "void", x, n, word.pointer("weight"), eps, before, out)
        f.jump(end)
        f.block(both)
        other = f.at(joined, row * word("js"))
        f.call("rms_row", "void", other, n, word.pointer("joined_norm"), eps, null, other)
        f.call("rms_row", "void", x, n, word.pointer("join_norm"), eps, other, x)
        f.call("rms_row", "void", x, n, word.pointer("weight"), eps, before, out)
        f.jump(end)
        f.block(end)
        factor = word.real("factor")
        with f.when(f.compare("une", factor, 1.0)):
            wide = f.splat(factor, WIDE)

            def scaled(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
                f.store_some(f.load_some(out, VECTOR, at, mask) * wide, out, at, mask)
                return []

            f.columns(n, scaled)


def _write_copies(module: Module) -> None:
    """Rows by number, rows beside each other, sums of rows."""
    for name in ("gather", "copy", "sum"):
        with loop_over_rows(module, name) as (f, word, row):
            source = f.load(word.pointer("which"), "i64", row * 8, 8) if name == "gather" else row
            x, out = f.at(word.pointer("x"), source * word("xs")), f.at(word.pointer("out"), row * word("os"))
            other = f.at(word.pointer("other"), row * word("ts")) if name == "sum" else x

            def moved(
                at: Value,
                mask: Value | None,
                _: list[Value],
                f: Function = f,
                x: Value = x,
                out: Value = out,
                other: Value = other,
            ) -> list[Value]:
                value = f.load_some(x, VECTOR, at, mask)
                if other is not x:
                    value = value + f.load_some(other, VECTOR, at, mask)
                f.store_some(value, out, at, mask)
                return []

            f.columns(word("n"), moved)


def _write_sigmoid(module: Module) -> None:
    """out = x · sigmoid(gate), column by column or with one gate for the row."""
    with loop_over_rows(module, "sigmoid") as (f, word, row):
        x, gate, out = (
            f.at(word.pointer(each), row * word(stride))
            for each, stride in (("x", "xs"), ("gate", "gs"), ("out", "os"))
        )
        shared = f.compare("ne", word("shared"), 0)
        one = f.splat(f.load(gate, FLOAT, 0, 4), WIDE)

        def gated(at: Value, mask: Value | None, _: list[Value]) -> list[Value]:
            # A shared gate has one column: what lies beyond it must not be read.
            place = f.select(shared, f.constant(0), at)
            inside = f.splat(f.compare("eq", shared, Value(f, "i1", "false")), WIDE)
            mine = inside if mask is None else inside & mask
            g = f.select(f.splat(shared, WIDE), one, f.load_some(gate, VECTOR, place, mine))
            value = f.load_some(x, VECTOR, at, mask) / (f.exponential(f.constant(0.0, VECTOR) - g) + 1.0)
            f.store_some(value, out, at, mask)
            return []

        f.columns(word("n"), gated)
