"""A model's pass written down once and run again for any rows: the loops of all layers in one call.

`Recorder` has the methods of `CpuKernels`, but its rows are places in memory, and what a method would run is added to a
program. Memory is used again as soon as nothing refers to the rows that lay there. What has no compiled loop yet runs
in Python between two stretches of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.cpu.layout import BLOCK, RECORD
from forerun.kernels.cpu.loops import ARGUMENTS
from forerun.kernels.cpu.ops import CpuKernels, RowPlace
from forerun.kernels.cpu.plan import RowPlan
from forerun.kernels.cpu.threads import LoopCall, Program
from forerun.kernels.interface import (
    Activation,
    Angles,
    Decay,
    DeltaLayout,
    Experts,
    PassRows,
)
from forerun.kernels.matrix import Matrix

LOGITS = 1 << 60  # stands for the address of a pass's logits, which are new memory in every run
ROUNDING = ("norm", "silu", "gelu")  # loops that can round what they give


class Memory:
    """Blocks of bytes, handed out again when their last user is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self.bytes = 0

    def take(self, size: int) -> MemoryBlock:
        """A block of at least so many bytes, at a multiple of 64."""
        size += -size % RECORD
        free = self._free.setdefault(size, [])
        if not free:
            free.append(np.zeros(size + RECORD, np.uint8))
            self.bytes += size
        return MemoryBlock(free.pop(), free)


class MemoryBlock:
    """Goes back where it came from with its last reference."""

    def __init__(self, memory: np.ndarray, free: list[np.ndarray]) -> None:
        self.memory, self._free = memory, free
        self.address = memory.ctypes.data + -memory.ctypes.data % RECORD

    def __del__(self) -> None:
        self._free.append(self.memory)


class Rows:
    """Float32 rows of the pass that is written down: where they are, and which loop makes them."""

    def __init__(self, place: RowPlace, block: MemoryBlock | None, base: int = 0) -> None:
        self.place, self.block, self.base = place, block, base
        self.records: tuple[RowPlace, MemoryBlock] | None = None
        self.maker: LoopCall | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows is known only when a pass runs."""
        return -1, self.place.columns

    def __getitem__(self, index: tuple[slice, slice]) -> Rows:
        """Some columns."""
        every, columns = index
        assert every == slice(None)
        start, stop, _ = columns.indices(self.place.columns)
        place = self.place
        moved = RowPlace(place.address + 4 * start, place.stride, stop - start, place.rows)
        return Rows(moved, self.block, self.base + 4 * start)

    def view(self, count: int) -> Tensor:
        """As a tensor, while a pass of so many rows runs."""
        assert self.block is not None
        start = self.place.address - self.block.memory.ctypes.data
        stride = self.place.stride
        whole = self.block.memory[start - self.base : start - self.base + count * stride].view(np.float32)
        first = self.base // 4
        return torch.from_numpy(whole.reshape(count, stride // 4)[:, first : first + self.place.columns])


class Later:
    """What a step in Python gives to a later one: known only while a pass runs."""

    value: Any = None


@dataclass(slots=True)
class PythonStep:
    """What runs between two stretches of loops."""

    run: Callable[[Any], None]


class Recorder(CpuKernels):
    """Writes a pass down. `finish` gives what runs it."""

    def __init__(self, kernels: CpuKernels, capacity: int, groups: int, angles: Sequence[Angles]) -> None:
        self.kernels, self.library, self.capacity = kernels, kernels.library, capacity
        self.plan = RowPlan(capacity, groups, len(angles))
        self._angles = list(angles)
        self._memory = Memory()
        self._segments: list[Program | PythonStep] = []
        self.tokens = Later()  # of the rows [rows], for steps in Python

    # ---- what CpuKernels is written with

    def _place(self, x: Any) -> RowPlace:
        assert isinstance(x, Rows)
        return x.place

    def _new(self, like: Any, columns: int) -> Any:
        return self.rows(columns, like.place.rows)

    def rows(self, columns: int, count: int | None = None) -> Rows:
        """Room for as many rows as a pass may have."""
        block = self._memory.take(4 * columns * self.capacity)
        rows = self.plan.count.ctypes.data if count is None else count
        return Rows(RowPlace(block.address, 4 * columns, columns, rows), block)

    def _records(self, x: Any) -> RowPlace:
        if x.records is None:
            place = x.place
            stride = -(-place.columns // BLOCK) * RECORD
            block = self._memory.take(stride * self.capacity)
            records = RowPlace(block.address, stride, place.columns, place.rows)
            x.records = records, block
            maker = x.maker
            if maker is None:
                words = {"x": place.address, "xs": place.stride, "n": place.columns}
                words |= {"records": records.address, "rs": stride}
                self._run([self._loop("round", place.rows, words)])
            else:  # the loop that makes the rows can round them on the way
                names = ARGUMENTS[maker.name]
                maker.arguments[names.index("records")] = records.address
                maker.arguments[names.index("rs")] = stride
        found: RowPlace = x.records[0]
        return found

    def _run(self, loops: list[LoopCall]) -> None:
        if not self._segments or isinstance(self._segments[-1], PythonStep):
            self._segments.append(Program())
        program = self._segments[-1]
        assert isinstance(program, Program)
        program.stages.append(loops)

    def _made(self, out: Any, call: LoopCall) -> None:
        out.maker = call

    def _done(self) -> None:
        pass

    def _plan(self, rows: PassRows, angles: Angles | None, shared: int) -> tuple[RowPlan, int]:  # noqa: ARG002
        self.plan.shared = max(self.plan.shared, shared)
        which = next((index for index, each in enumerate(self._angles) if each is angles), 0)
        return self.plan, which

    def pick(self, x: Any, rows: Any) -> Any:  # noqa: ARG002 - the plan says which
        out = self.rows(x.shape[1], self.plan.wanted_count.ctypes.data)
        words = {"x": x.place.address, "xs": x.place.stride, "n": x.shape[1], "which": self.plan.wanted.ctypes.data}
        words |= {"out": out.place.address, "os": out.place.stride}
        self._run([self._loop("gather", out.place.rows, words)])
        return out

    def logits(self, x: Any, matrix: Matrix, cap: float = 0.0) -> Any:
        size = matrix.shape[0]
        out: Any = Rows(RowPlace(LOGITS, 4 * size, size, x.place.rows), None)
        self._multiply(x, matrix, out, None)
        return self.soft_cap(out, cap) if cap else out

    # ---- steps in Python

    def _step(self, run: Callable[[Any], None]) -> None:
        self._segments.append(PythonStep(run))

    def recurrence(
        self,
        x: Any,
        gates: Any,
        layout: DeltaLayout,
        rows: PassRows,  # noqa: ARG002 - those of the pass under way
        layer: int,
        convolution: Tensor,
        decay: Decay,
    ) -> Any:
        out = self.rows(layout.values)

        def run(batch: Any) -> None:
            n = len(batch.tokens)
            found = self.kernels.recurrence(x.view(n), gates.view(n), layout, batch.rows, layer, convolution, decay)
            out.view(n).copy_(found)

        self._step(run)
        return out

    def gated_norm(self, x: Any, gate: Any, first: int, weight: Tensor, eps: float) -> Any:
        out = self._new(x, x.shape[1])

        def run(batch: Any) -> None:
            n = len(batch.tokens)
            out.view(n).copy_(self.kernels.gated_norm(x.view(n), gate.view(n), first, weight, eps))

        self._step(run)
        return out

    def route(self, logits: Any, top: int, scale: Tensor | None = None) -> Any:
        ids, weights = Later(), Later()

        def run(batch: Any) -> None:
            ids.value, weights.value = self.kernels.route(logits.view(len(batch.tokens)), top, scale)

        self._step(run)
        return ids, weights

    def experts(
        self,
        x: Any,
        ids: Any,
        weights: Any,
        experts: Experts,
        activation: Activation = "silu",
    ) -> Any:
        out = self._new(x, x.shape[1])

        def run(batch: Any) -> None:
            n = len(batch.tokens)
            out.view(n).copy_(self.kernels.experts(x.view(n), ids.value, weights.value, experts, activation))

        self._step(run)
        return out

    def layer_inputs(
        self, seen: Any, scale: float, norm: Tensor, eps: float, tokens: Any, table: Any, table_scale: float
    ) -> Any:
        out = self._new(seen, seen.shape[1])

        def run(batch: Any) -> None:
            n = len(batch.tokens)
            found = self.kernels.layer_inputs(seen.view(n), scale, norm, eps, tokens.value, table, table_scale)
            out.view(n).copy_(found)

        self._step(run)
        return out

    # ---- the end

    def finish(self) -> Recording:
        """Nothing more is written down."""
        patches = []
        for segment in self._segments:
            if isinstance(segment, Program):
                for loop in (loop for stage in segment.stages for loop in stage):
                    for index in np.flatnonzero(loop.arguments >= LOGITS):
                        patches.append((loop.arguments, int(index), int(loop.arguments[index]) - LOGITS))
                segment.close()
        return Recording(self, self._segments, patches)


class Recording:
    """A pass that is ready to run for any rows that there is room for."""

    def __init__(
        self,
        recorder: Recorder,
        segments: list[Program | PythonStep],
        patches: list[tuple[np.ndarray, int, int]],
    ) -> None:
        self.plan, self.capacity = recorder.plan, recorder.capacity
        self._recorder, self._segments, self._patches = (
            recorder,
            segments,
            patches,
        )  # the memory stays with the recorder

    def run(self, batch: Any, logits: Tensor) -> None:
        """The plan is filled in, and so are the inputs; `logits` [wanted rows, vocabulary] are written."""
        base = logits.data_ptr()
        for arguments, index, offset in self._patches:
            arguments[index] = base + offset
        threads = self._recorder.library.threads
        for segment in self._segments:
            if isinstance(segment, Program):
                threads.run(segment)
            else:
                segment.run(batch)
