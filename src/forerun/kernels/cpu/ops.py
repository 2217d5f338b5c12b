"""All operations on a CPU: each is a compiled loop (or a few) over the rows of a pass.

The methods say which loops run, with which addresses. Here each runs at once, on tensors; `recording.py` writes the
same loops down, to be run again and again in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu.attention import ATTEND, ITEMS, ROTATE
from forerun.kernels.cpu.layout import BLOCK, RECORD
from forerun.kernels.cpu.library import library
from forerun.kernels.cpu.loops import ARGUMENTS
from forerun.kernels.cpu.plan import RowPlan
from forerun.kernels.cpu.recurrent import RecurrentCpu
from forerun.kernels.cpu.threads import OPS, LoopCall, Program
from forerun.kernels.cpu.tiles import TileMemory, Tiles, empty_tiles, pack_blocks, pack_exact, pack_part, pack_rounded
from forerun.kernels.interface import (
    Activation,
    Angles,
    AttentionSpec,
    HeadLayout,
    HeadNorms,
    Joined,
    LayerPages,
    PassRows,
)
from forerun.kernels.matrix import Matrix, Parts, Rounded, Table, TiledMatrix, Weight, as_tensor
from forerun.kernels.parts import WeightPart

PIECE_BYTES = 128 << 10  # of weights that a thread takes at a time: less, and threads mostly agree on who takes what
PIECE_ROWS = 64  # rows of a piece: their activations stay in a core's cache while tiles go by
KNOWN_VALUES = 4 << 20  # of a table of embeddings that are kept decoded: what a text says once it mostly says again
LOOP_ROWS = 8  # rows of a piece of the small loops


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where rows are: what loops need to know of a tensor."""

    address: int
    stride: int  # bytes from row to row
    columns: int
    rows: int  # address of the int32 that says how many rows there are


class CpuKernels(RecurrentCpu):
    """float32 activations; weights in the format they are stored in, floats rounded to blocks of 8 bits on request."""

    def __init__(self, quantize: bool) -> None:
        self.quantize = quantize
        self.library = library()
        self.name = f"cpu, {self.library.body.name}" + ("" if quantize else ", float32")
        self._tile_memory = TileMemory()
        self._table: Parts | None = None  # that embeddings were last looked up in
        self._known: dict[int, Tensor] = {}  # its rows that were decoded lately
        self._rows: list[np.ndarray] = []  # counts of the operation under way

    # ---- weights

    def matrix(self, weight: Weight, bias: Tensor | None) -> TiledMatrix:
        if isinstance(weight, Parts) and self.quantize:
            packed = [self._repacked(part) for part in weight.parts]
        elif isinstance(weight, Rounded) and self.quantize:
            packed = [pack_rounded(weight.values.numpy(), weight.scale.numpy(), self._tile_memory)]
        else:
            values = as_tensor(weight).float().contiguous().numpy()
            pack = pack_blocks if self.quantize else pack_exact
            packed = [pack(values, self._tile_memory)]
        return tiled(packed, bias, weight.shape)

    def _repacked(self, part: WeightPart) -> Tiles:
        """A stored part in its own format, as tiles."""
        if part.format.floats is None:
            tiles = empty_tiles(part, self._tile_memory)
            if self.library.repack(part, tiles):
                return tiles
        return pack_part(part, self._tile_memory)

    def float_matrix(self, weight: Tensor, bias: Tensor | None) -> TiledMatrix:
        values = weight.float().contiguous().numpy()
        return tiled([pack_exact(values, self._tile_memory)], bias, (weight.shape[0], weight.shape[1]))

    def draft_matrix(self, weight: Tensor) -> TiledMatrix:
        if not self.quantize:
            return self.matrix(weight, None)
        values = weight.float().contiguous().numpy()
        return tiled([pack_blocks(values, self._tile_memory, bits=4)], None, (weight.shape[0], weight.shape[1]))

    def embed(self, tokens: Tensor, table: Table) -> Tensor:
        if isinstance(table, Tensor):
            return super().embed(tokens, table)
        if self._table is not table:
            self._table, self._known = table, {}
        ids = tokens.tolist()
        missing = [token for token in dict.fromkeys(ids) if token not in self._known]
        if missing:
            if (len(self._known) + len(missing)) * table.shape[1] > KNOWN_VALUES:
                self._known, missing = {}, list(dict.fromkeys(ids))
            self._known.update(zip(missing, table[torch.tensor(missing)].float().split(1), strict=True))
        return self._known[ids[0]] if len(ids) == 1 else torch.cat([self._known[token] for token in ids])

    # ---- what the methods below are written with; a recording overrides it

    def _place(self, x: Tensor) -> RowPlace:
        assert x.dtype == torch.float32 and x.stride(-1) == 1
        count = np.array([len(x)], np.int32)
        self._rows.append(count)
        return RowPlace(x.data_ptr(), 4 * x.stride(0), x.shape[1], count.ctypes.data)

    def _new(self, like: Tensor, columns: int) -> Tensor:
        return torch.empty(len(like), columns)

    def _records(self, x: Tensor) -> RowPlace:
        """Rows rounded for products."""
        place = self._place(x)
        stride = -(-place.columns // BLOCK) * RECORD
        room = np.empty(len(x) * stride + RECORD, np.uint8)
        self._rows.append(room)
        records = RowPlace(room.ctypes.data + -room.ctypes.data % RECORD, stride, place.columns, place.rows)
        words = {"x": place.address, "xs": place.stride, "n": place.columns, "records": records.address, "rs": stride}
        self._run([self._loop("round", place.rows, words)])
        return records

    def _run(self, loops: list[LoopCall]) -> None:
        """One stage."""
        program = Program([loops])
        program.close()
        self.library.threads.run(program)

    def _done(self) -> None:
        """The operation is over: nothing that it pointed to is needed any more."""
        self._rows.clear()

    def _made(self, out: Tensor, call: LoopCall) -> None:
        """`out` was made by a loop that can round its rows too."""

    def _plan(self, rows: PassRows, angles: Angles | None, shared: int) -> tuple[RowPlan, int]:
        """The plan of the rows, and which of its angles these are."""
        plan = RowPlan(int(rows.query_start[-1]), len(rows.block_tables), 1)
        plan.shared = shared
        plan.fill(rows, [] if angles is None else [angles], None)
        self._rows.append(plan)  # type: ignore[arg-type]
        return plan, 0

    # ---- loops by name

    def _loop(self, name: str, rows: int, words: dict[str, int]) -> LoopCall:
        """A small loop over rows."""
        words = {"rows": rows, "per_piece": LOOP_ROWS, **words}
        arguments = np.array([words.get(each, 0) for each in ARGUMENTS[name]], np.int64)
        return LoopCall(self.library.loop(name), arguments, rows, 1, LOOP_ROWS, name)

    def _product(self, x: Tensor, matrix: Matrix, before: Tensor | None = None) -> Tensor:
        out = self._new(x, matrix.shape[0])
        self._multiply(x, matrix, out, before)
        return out

    def _multiply(self, x: Tensor, matrix: Matrix, out: Tensor, before: Tensor | None) -> None:
        """out = linear(x), and plus what was there before."""
        assert isinstance(matrix, TiledMatrix)
        place, target = self._place(x), self._place(out)
        earlier = 0
        if before is not None:
            earlier_place = self._place(before)
            assert earlier_place.stride == target.stride, "what is added lies as the result does"
            earlier = earlier_place.address
        records = self._records(x) if any(part.format is not None for part in matrix.parts) else place
        loops, column = [], 0
        for part in matrix.parts:
            source = place if part.format is None else records
            tile = part.data.shape[1]
            tiles = len(part.data)
            per_piece = max(1, min(PIECE_BYTES // tile, -(-tiles // self.library.threads.most)))
            bias = 0 if matrix.bias is None else matrix.bias.data_ptr() + 4 * column
            arguments = [place.rows, source.address, source.stride, part.data.ctypes.data, part.groups]
            arguments += [target.address + 4 * column, target.stride // 4, part.outs, per_piece, PIECE_ROWS, bias]
            arguments += [earlier + 4 * column if earlier else 0]
            loops.append(
                LoopCall(
                    self.library.product(part),
                    np.array(arguments, np.int64),
                    place.rows,
                    -(-tiles // per_piece),
                    PIECE_ROWS,
                    "product",
                )
            )
            column += part.outs
        for start in range(0, len(loops), OPS):
            self._run(loops[start : start + OPS])

    # ---- products

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        out = self._product(x, matrix)
        self._done()
        return out

    def add_linear(self, x: Tensor, matrix: Matrix, before: Tensor) -> Tensor:
        out = self._product(x, matrix, before)
        self._done()
        return out

    def gated_linear(
        self,
        x: Tensor,
        matrix: Matrix,
        activation: Activation = "silu",
    ) -> Tensor:
        inner = self._product(x, matrix)
        half = matrix.shape[0] // 2
        return self._gated(inner[:, :half], inner[:, half:], activation)

    def gate_linear(self, x: Tensor, matrix: Matrix, own: Tensor) -> Tensor:
        return self._gated(self._product(x, matrix), own, "gelu_tanh")

    def _gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) · up."""
        left, right = self._place(gate), self._place(up)
        out = self._new(gate, left.columns)
        target = self._place(out)
        words = {"x": left.address, "xs": left.stride, "up": right.address, "us": right.stride, "n": left.columns}
        words |= {"out": target.address, "os": target.stride}
        call = self._loop("silu" if activation == "silu" else "gelu", left.rows, words)
        self._run([call])
        self._made(out, call)
        self._done()
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        return self._gated(gate_up[:, :half], gate_up[:, half:], "silu")

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[1] // 2
        return self._gated(gate_up[:, :half], gate_up[:, half:], "gelu_tanh")

    def logits(self, x: Tensor, matrix: Matrix, cap: float = 0.0) -> Tensor:
        out = self._product(x, matrix)
        if cap:
            out = self.soft_cap(out, cap)
        self._done()
        return out

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        place = self._place(logits)
        words = {"x": place.address, "xs": place.stride, "n": place.columns, "cap": word_of(cap)}
        self._run([self._loop("cap", place.rows, words)])
        return logits

    def rule_out(self, logits: Tensor, never: Tensor) -> Tensor:
        place = self._place(logits)
        words = {"x": place.address, "xs": place.stride, "which": never.data_ptr(), "count": len(never)}
        self._run([self._loop("never", place.rows, words)])
        self._done()
        return logits

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        place = self._place(x)
        out = self._new(x, place.columns)
        target = self._place(out)
        words = {"x": place.address, "xs": place.stride, "n": place.columns, "weight": weight.data_ptr()}
        words |= {"eps": word_of(eps), "out": target.address, "os": target.stride}
        call = self._loop("norm", place.rows, words)
        self._run([call])
        self._made(out, call)
        self._done()
        return out

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        before: Tensor,
        factor: float,
        then: Sequence[Tensor] = (),
        joined: Joined | None = None,
    ) -> tuple[Tensor, ...]:
        place, earlier = self._place(x), self._place(before)
        out = self._new(x, place.columns)
        target = self._place(out)
        words = {"x": place.address, "xs": place.stride, "n": place.columns, "weight": weight.data_ptr()}
        words |= {"eps": word_of(eps), "before": earlier.address, "bs": earlier.stride, "factor": word_of(factor)}
        words |= {"out": target.address, "os": target.stride}
        if joined is not None:
            other = self._place(joined.other)
            words |= {"joined": other.address, "js": other.stride}
            words |= {"join_norm": joined.norm.data_ptr(), "joined_norm": joined.other_norm.data_ptr()}
        self._run([self._loop("add_norm", place.rows, words)])
        self._done()
        return (out, *(self.rms_norm(out, each, eps) for each in then))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        left, right = self._place(x), self._place(other)
        out = self._new(x, left.columns)
        target = self._place(out)
        words = {"x": left.address, "xs": left.stride, "other": right.address, "ts": right.stride, "n": left.columns}
        words |= {"out": target.address, "os": target.stride}
        self._run([self._loop("sum", left.rows, words)])
        self._done()
        return out

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        places = [self._place(part) for part in parts]
        out = self._new(parts[0], sum(place.columns for place in places))
        target, column = self._place(out), 0
        for place in places:
            words = {"x": place.address, "xs": place.stride, "n": place.columns}
            words |= {"out": target.address + 4 * column, "os": target.stride}
            self._run([self._loop("copy", place.rows, words)])
            column += place.columns
        self._done()
        return out

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x[:, start:stop]

    def sigmoid_gate(self, x: Tensor, gate: Tensor, first: int) -> Tensor:
        place, other = self._place(x), self._place(gate)
        out = self._new(x, place.columns)
        target = self._place(out)
        words = {"x": place.address, "xs": place.stride, "gate": other.address + 4 * first, "gs": other.stride}
        words |= {"shared": int(other.columns - first == 1), "n": place.columns}
        words |= {"out": target.address, "os": target.stride}
        self._run([self._loop("sigmoid", place.rows, words)])
        self._done()
        return out

    # ---- rows among the rows of their sequence

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        rows: PassRows,
        layer: LayerPages,
        angles: Angles,
        norms: HeadNorms | None,
    ) -> None:
        plan, which = self._plan(rows, angles, 1)
        place = self._place(qkv)
        words = {"rows": place.rows, "per_piece": LOOP_ROWS, "x": place.address, "xs": place.stride}
        words |= {"heads": layout.heads, "kv_heads": layout.kv_heads, "size": layout.size}
        words |= {"half": self._half(angles), "page": layer.keys.shape[3]}
        words |= {"cos": plan.turns[which : which + 1].ctypes.data, "sin": plan.turns[which, 1:].ctypes.data}
        words |= {"turn": plan.turns[which, 2:].ctypes.data}
        words |= row_words(plan, layer)
        if norms is not None:
            words |= {"query_norm": norms.queries.data_ptr(), "eps": word_of(norms.eps)}
            if layout.kv_heads:
                words |= {"key_norm": norms.keys.data_ptr()}
                words |= {} if norms.values is None else {"value_norm": norms.values.data_ptr()}
        arguments = np.array([words.get(name, 0) for name in ROTATE], np.int64)
        self._run([LoopCall(self.library.loop("rotate"), arguments, place.rows, 1, LOOP_ROWS, "rotate")])
        self._done()

    def _half(self, angles: Angles) -> int:
        """Pairs of columns that turn."""
        assert angles.cos.is_contiguous() and angles.sin.is_contiguous()
        return angles.cos.shape[1]

    def attention(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        rows: PassRows,
        layer: LayerPages,
    ) -> Tensor:
        layout, kv_heads = spec.layout, layer.keys.shape[1]
        shared = layout.heads // kv_heads
        assert shared <= ITEMS, "query heads of a key head"
        plan, _ = self._plan(rows, None, shared)
        place = self._place(qkv)
        out = self._new(qkv, layout.key_column)
        target = self._place(out)
        words = {"tiles": plan.tiles.ctypes.data, "x": place.address, "xs": place.stride}
        words |= {"out": target.address, "os": target.stride, "kv_heads": kv_heads, "shared": shared}
        words |= {"scale": word_of(spec.factor), "softcap": word_of(spec.softcap), "window": spec.window}
        words |= {"stop": plan.stop.ctypes.data, "first": plan.first.ctypes.data} | row_words(plan, layer)
        arguments = np.array([words.get(name, 0) for name in ATTEND], np.int64)
        function = self.library.attention(layout.size, layer.keys.shape[3])
        self._run([LoopCall(function, arguments, plan.tile_count.ctypes.data, kv_heads, 1, "attend")])
        self._done()
        return out


def row_words(plan: RowPlan, layer: LayerPages) -> dict[str, int]:
    """Whose rows they are, and where their pages."""
    table = plan.tables[layer.group]
    return {
        "owner": plan.owner.ctypes.data,
        "position": plan.position.ctypes.data,
        "table": table[:1].ctypes.data,
        "table_stride": table[1:].ctypes.data,
        "keys": layer.keys.data_ptr(),
        "values": layer.values.data_ptr(),
    }


def tiled(parts: list[Tiles], bias: Tensor | None, shape: tuple[int, ...]) -> TiledMatrix:
    """A matrix of parts, one below the other; what is added to its outputs is float32."""
    return TiledMatrix(parts, None if bias is None else bias.float().contiguous(), (shape[0], shape[1]))


def word_of(number: float) -> int:
    """A float32 as the lower half of a 64-bit word."""
    word: int = struct.unpack("<q", struct.pack("<fi", number, 0))[0]
    return word
