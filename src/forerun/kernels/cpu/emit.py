"""A small writer of LLVM IR: values with operators, loops, loads and stores. What is written is what runs.

>>> module = Module()
>>> f = module.function("twice", [("x", "i64")], "i64")
>>> f.ret(f["x"] + f["x"])
>>> "add i64 %x, %x" in module.text()
True
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

WIDE = 16  # lanes of the loops over columns on every machine: LLVM cuts them where vectors are narrower
LOWEST, HIGHEST = -87.0, 88.0  # arguments of e^x that float32 can hold the result of
LOG2E, LN2_HIGH, LN2_LOW = 1 / math.log(2), 0.693359375, -2.12194440e-4
FLOATS = ("float", "half", "double", "bfloat")


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a function: its LLVM type and how it is written there."""

    f: Function
    type: str
    name: str

    @property
    def lanes(self) -> int:
        """Of a vector; 0 for a scalar."""
        return int(self.type[1:].split(" x ")[0]) if self.type.startswith("<") else 0

    @property
    def element(self) -> str:
        """The type of one lane."""
        return self.type[1:-1].split(" x ")[1] if self.lanes else self.type

    def _binary(self, real: str, whole: str, other: Value | int | float) -> Value:
        right = other if isinstance(other, Value) else self.f.constant(other, self.type)
        assert right.type == self.type, f"{real}: {self.type} and {right.type}"
        word = real if self.element in FLOATS else whole
        return self.f.emit(self.type, f"{word} {self.type} {self.name}, {right.name}")

    def __add__(self, other: Value | int | float) -> Value:
        return self._binary("fadd", "add", other)

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary("fsub", "sub", other)

    def __mul__(self, other: Value | int | float) -> Value:
        return self._binary("fmul", "mul", other)

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary("fdiv", "sdiv", other)

    def __floordiv__(self, other: Value | int) -> Value:
        """Of whole numbers that are not negative."""
        return self._binary("", "udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("", "urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("", "and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("", "or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("", "xor", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("", "shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Zeros come in from above."""
        return self._binary("", "lshr", other)


class Module:
    """Functions and what they declare."""

    def __init__(self) -> None:
        self._functions: list[Function] = []
        self._declared: dict[str, None] = {}

    def function(self, name: str, arguments: Sequence[tuple[str, str]], result: str = "void") -> Function:
        """A new function; its arguments are (name, type)."""
        made = Function(self, name, arguments, result)
        self._functions.append(made)
        return made

    def declare(self, line: str) -> None:
        """Something from outside."""
        self._declared[f"declare {line}"] = None

    def text(self) -> str:
        """The whole module."""
        # Without these, vectors as wide as the code writes them are cut in two on CPUs that prefer narrower ones.
        attributes = 'attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }'
        return "\n".join([*self._declared, *(each.text() for each in self._functions), attributes, ""])


@dataclass(slots=True)
class Loop:
    """A loop under way: the index, what it carries from round to round, and what that is after the last one."""

    index: Value
    carried: list[Value]
    next: list[Value] = field(default_factory=list)
    result: list[Value] = field(default_factory=list)


class Function:
    """One function. Values are made in the order in which methods are called."""

    def __init__(self, module: Module, name: str, arguments: Sequence[tuple[str, str]], result: str) -> None:
        self.module, self.name, self.result = module, name, result
        self._arguments = [Value(self, kind, f"%{each}") for each, kind in arguments]
        self._by_name = {each: value for (each, _), value in zip(arguments, self._arguments, strict=True)}
        self._lines: list[str] = []
        self._count = 0
        self._label = "entry"
        self._slots: list[str] = []
        self.linkage = ""

    def __getitem__(self, name: str) -> Value:
        return self._by_name[name]

    def text(self) -> str:
        """The definition."""
        arguments = ", ".join(f"{value.type} {value.name}" for value in self._arguments)
        body = "\n".join(["entry:", *self._slots, *self._lines])
        return f"define {self.linkage} {self.result} @{self.name}({arguments}) #0 {{\n{body}\n}}\n"

    def fresh(self, stem: str = "v") -> str:
        """A name that was not used."""
        self._count += 1
        return f"{stem}{self._count}"

    def line(self, text: str) -> None:
        self._lines.append("  " + text)

    def emit(self, kind: str, text: str) -> Value:
        """A new value."""
        name = "%" + self.fresh()
        self.line(f"{name} = {text}")
        return Value(self, kind, name)

    def ret(self, value: Value | None = None) -> None:
        self.line("ret void" if value is None else f"ret {value.type} {value.name}")

    # ---- constants and conversions

    def constant(self, number: int | float, kind: str = "i64") -> Value:
        """The same number in every lane."""
        if kind.startswith("<"):
            one = self.constant(number, kind[1:-1].split(" x ")[1])
            return self.vector([one.name] * int(kind[1:].split(" x ")[0]), one.type)
        if kind in FLOATS:
            rounded = struct.unpack("f", struct.pack("f", number))[0]  # as a float32, written as LLVM wants it
            return Value(self, kind, "0x" + struct.pack(">d", rounded).hex().upper())
        return Value(self, kind, str(int(number)))

    def vector(self, names: Sequence[str | int], element: str) -> Value:
        """A vector of constants."""
        kind = f"<{len(names)} x {element}>"
        return Value(self, kind, "<" + ", ".join(f"{element} {name}" for name in names) + ">")

    def convert(self, value: Value, how: str, element: str) -> Value:
        """`how` is LLVM's word: zext, sext, trunc, sitofp, fpext, fptosi, bitcast of each lane, …"""
        kind = f"<{value.lanes} x {element}>" if value.lanes else element
        return self.emit(kind, f"{how} {value.type} {value.name} to {kind}")

    def bitcast(self, value: Value, kind: str) -> Value:
        return value if kind == value.type else self.emit(kind, f"bitcast {value.type} {value.name} to {kind}")

    def splat(self, value: Value, lanes: int) -> Value:
        """A scalar in every lane."""
        kind = f"<{lanes} x {value.type}>"
        one = self.emit(kind, f"insertelement {kind} poison, {value.type} {value.name}, i32 0")
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.emit(kind, f"shufflevector {kind} {one.name}, {kind} poison, {zeros}")

    def shuffle(self, left: Value, right: Value | None, order: Sequence[int]) -> Value:
        """Lanes of both, by number."""
        other = "poison" if right is None else right.name
        mask = ", ".join(f"i32 {index}" for index in order)
        return self.emit(
            f"<{len(order)} x {left.element}>",
            f"shufflevector {left.type} {left.name}, {left.type} {other}, <{len(order)} x i32> <{mask}>",
        )

    def extract(self, value: Value, lane: int) -> Value:
        return self.emit(value.element, f"extractelement {value.type} {value.name}, i32 {lane}")

    # ---- memory

    def at(self, base: Value, offset: Value | int) -> Value:
        """base + offset bytes."""
        assert base.type == "ptr"
        if isinstance(offset, int):
            if not offset:
                return base
            offset = self.constant(offset)
        return self.emit("ptr", f"getelementptr i8, ptr {base.name}, i64 {offset.name}")

    def load(self, base: Value, kind: str, offset: Value | int = 0, align: int = 1) -> Value:
        where = self.at(base, offset)
        return self.emit(kind, f"load {kind}, ptr {where.name}, align {align}")

    def store(self, value: Value, base: Value, offset: Value | int = 0, align: int = 1) -> None:
        where = self.at(base, offset)
        self.line(f"store {value.type} {value.name}, ptr {where.name}, align {align}")

    def load_some(self, base: Value, kind: str, offset: Value | int, mask: Value | None) -> Value:
        """The lanes of the mask; zeros in the other ones. Without a mask all lanes."""
        if mask is None:
            return self.load(base, kind, offset, 4)
        lanes, element = int(kind[1:].split(" x ")[0]), kind[1:-1].split(" x ")[1]
        short = {"float": "f32", "i32": "i32"}[element]
        where, zeros = self.at(base, offset), Value(self, kind, "zeroinitializer")
        name = f"llvm.masked.load.v{lanes}{short}.p0"
        return self.intrinsic(name, kind, where, self.constant(4, "i32"), mask, zeros)

    def store_some(self, value: Value, base: Value, offset: Value | int, mask: Value | None) -> None:
        """The lanes of the mask, or all of them."""
        if mask is None:
            self.store(value, base, offset, 4)
            return
        short = {"float": "f32", "i32": "i32"}[value.element]
        where = self.at(base, offset)
        name = f"llvm.masked.store.v{value.lanes}{short}.p0"
        self.intrinsic(name, "void", value, where, self.constant(4, "i32"), mask)

    def columns(
        self, count: Value, body: Callable[[Value, Value | None, list[Value]], list[Value]], carry: Sequence[Value] = ()
    ) -> list[Value]:
        """All columns of a row, sixteen at a time: body(offset in bytes, mask, carried) gives what is carried on.

        The columns that are left over are one more vector with a mask, so that every column sees the same operations.
        """
        whole = count & -WIDE
        with self.loop(0, whole, WIDE, carry) as at:
            at.next = body(at.index * 4, None, at.carried)
        left = self.splat(self.convert(count - whole, "trunc", "i32"), WIDE)
        mask = self.compare("slt", self.vector(range(WIDE), "i32"), left)
        return body(whole * 4, mask, at.result)

    def fold(self, value: Value, how: Callable[[Value, Value], Value]) -> Value:
        """One number from all lanes, by halving: always the same tree."""
        lanes = value.lanes
        while lanes > 1:
            lanes //= 2
            value = how(self.shuffle(value, None, range(lanes)), self.shuffle(value, None, range(lanes, 2 * lanes)))
        return self.extract(value, 0)

    def exponential(self, x: Value) -> Value:
        """e^x for float32 vectors, between e^-87 and e^88: the same bits in every lane of every machine."""
        x = self.select(self.compare("ogt", x, LOWEST), x, self.constant(LOWEST, x.type))
        x = self.select(self.compare("olt", x, HIGHEST), x, self.constant(HIGHEST, x.type))
        n = self.unary("floor", self.fma(x, self.constant(LOG2E, x.type), self.constant(0.5, x.type)))
        f = self.fma(n, self.constant(-LN2_HIGH, x.type), x)
        f = self.fma(n, self.constant(-LN2_LOW, x.type), f)
        p = self.constant(1 / math.factorial(7), x.type)
        for power in range(6, -1, -1):
            p = self.fma(p, f, self.constant(1 / math.factorial(power), x.type))
        bits = (self.convert(n, "fptosi", "i32") + 127) << 23
        return p * self.bitcast(bits, x.type)

    def prefetch(self, base: Value, offset: int) -> None:
        """Asks for what will be read soon; the place may be beyond the end."""
        self.module.declare("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.line(f"call void @llvm.prefetch.p0(ptr {self.at(base, offset).name}, i32 0, i32 3, i32 1)")

    def room(self, size: int) -> Value:
        """Bytes on the stack, at a multiple of 64."""
        name = "%" + self.fresh("room")
        self._slots.append(f"  {name} = alloca [{size} x i8], align 64")
        return Value(self, "ptr", name)

    def read_shared(self, base: Value, offset: int = 0) -> Value:
        """An int64 that other threads write; what they wrote before it is seen."""
        return self.emit("i64", f"load atomic i64, ptr {self.at(base, offset).name} acquire, align 8")

    def write_shared(self, value: Value, base: Value, offset: int = 0) -> None:
        """An int64 that other threads read; what was written before it is seen by them."""
        self.line(f"store atomic i64 {value.name}, ptr {self.at(base, offset).name} release, align 8")

    def add_shared(self, base: Value, offset: int, value: Value | int) -> Value:
        """Adds at once; what was there before."""
        more = value if isinstance(value, Value) else self.constant(value)
        where = self.at(base, offset)
        return self.emit("i64", f"atomicrmw add ptr {where.name}, i64 {more.name} acq_rel")

    def exchange(self, base: Value, offset: int, expected: Value, value: Value) -> Value:
        """Writes where the expected number still stands: did it?"""
        where = self.at(base, offset)
        both = f"cmpxchg ptr {where.name}, i64 {expected.name}, i64 {value.name} acq_rel acquire"
        pair = self.emit("{ i64, i1 }", both)
        return self.emit("i1", f"extractvalue {{ i64, i1 }} {pair.name}, 1")

    # ---- calls

    def call(self, name: str, kind: str, *arguments: Value) -> Value:
        """A function of this module, or a declared one."""
        given = ", ".join(f"{value.type} {value.name}" for value in arguments)
        if kind == "void":
            self.line(f"call void @{name}({given})")
            return Value(self, "void", "")
        return self.emit(kind, f"call {kind} @{name}({given})")

    def intrinsic(self, name: str, kind: str, *arguments: Value) -> Value:
        """One of LLVM's own, declared on the way."""
        self.module.declare(f"{kind} @{name}({', '.join(value.type for value in arguments)})")
        return self.call(name, kind, *arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a · b + c, rounded once."""
        kind = a.type
        suffix = f"v{a.lanes}f32" if a.lanes else "f32"
        return self.intrinsic(f"llvm.fma.{suffix}", kind, a, b, c)

    def unary(self, name: str, value: Value) -> Value:
        """An intrinsic of one float (or vector of floats): fabs, floor, sqrt, rint …"""
        suffix = f"v{value.lanes}f32" if value.lanes else "f32"
        return self.intrinsic(f"llvm.{name}.{suffix}", value.type, value)

    # ---- control

    def compare(self, how: str, left: Value, right: Value | int | float) -> Value:
        """slt, eq, … of whole numbers; ogt, … of floats."""
        other = right if isinstance(right, Value) else self.constant(right, left.type)
        word = "fcmp" if left.element in FLOATS else "icmp"
        kind = f"<{left.lanes} x i1>" if left.lanes else "i1"
        return self.emit(kind, f"{word} {how} {left.type} {left.name}, {other.name}")

    def select(self, test: Value, yes: Value, no: Value) -> Value:
        return self.emit(yes.type, f"select {test.type} {test.name}, {yes.type} {yes.name}, {no.type} {no.name}")

    def minimum(self, left: Value, right: Value | int) -> Value:
        """Of whole numbers."""
        other = right if isinstance(right, Value) else self.constant(right, left.type)
        return self.select(self.compare("slt", left, other), left, other)

    def maximum(self, left: Value, right: Value | int) -> Value:
        other = right if isinstance(right, Value) else self.constant(right, left.type)
        return self.select(self.compare("sgt", left, other), left, other)

    def block(self, label: str) -> None:
        """What follows is reached under this label."""
        self._lines.append(f"{label}:")
        self._label = label

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def branch(self, test: Value, yes: str, no: str) -> None:
        self.line(f"br i1 {test.name}, label %{yes}, label %{no}")

    @contextmanager
    def when(self, test: Value) -> Iterator[None]:
        """Only where the test holds; nothing is carried out of it but what is stored."""
        inside, after = self.fresh("then"), self.fresh("after")
        self.branch(test, inside, after)
        self.block(inside)
        yield
        self.jump(after)
        self.block(after)

    @contextmanager
    def forever(self) -> Iterator[tuple[str, str]]:
        """A loop that ends by a jump: the labels of its begin and of what follows it."""
        begin, after = self.fresh("again"), self.fresh("left")
        self.jump(begin)
        self.block(begin)
        yield begin, after
        self.jump(begin)
        self.block(after)

    def leave_when(self, test: Value, label: str) -> None:
        """Jumps where the test holds."""
        on = self.fresh("on")
        self.branch(test, label, on)
        self.block(on)

    @contextmanager
    def loop(
        self, start: Value | int, stop: Value | int, step: Value | int = 1, carry: Sequence[Value] = ()
    ) -> Iterator[Loop]:
        """for index in range(start, stop, step). Set `next` to what the following round carries."""
        head, body, after = self.fresh("head"), self.fresh("body"), self.fresh("done")
        first = start if isinstance(start, Value) else self.constant(start)
        last = stop if isinstance(stop, Value) else self.constant(stop)
        stride = step if isinstance(step, Value) else self.constant(step)
        before = self._label
        self.jump(head)
        self.block(head)
        place = len(self._lines)
        index = Value(self, "i64", "%" + self.fresh("i"))
        carried = [Value(self, value.type, "%" + self.fresh("c")) for value in carry]
        made = Loop(index, carried)
        self._lines += [""] * (1 + len(carried))
        test = self.compare("slt", index, last)
        self.branch(test, body, after)
        self.block(body)
        yield made
        assert len(made.next) == len(carried), "a loop must say what the next round carries"
        following = index + stride
        latch = self._label
        self.jump(head)
        for row, (value, begin, then) in enumerate(
            zip([index, *carried], [first, *carry], [following, *made.next], strict=True)
        ):
            self._lines[place + row] = (
                f"  {value.name} = phi {value.type} [ {begin.name}, %{before} ], [ {then.name}, %{latch} ]"
            )
        self.block(after)
        made.result = carried
