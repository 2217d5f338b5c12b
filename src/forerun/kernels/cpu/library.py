"""Compiled code of a body: what every model needs, and what depends on its weights' formats and its heads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from forerun.cgroups import processors
from forerun.home import forerun_home
from forerun.kernels.cpu import attention, emit, layout, loops, machine, products, repacking, threads
from forerun.kernels.cpu.attention import Attention, write_rotation
from forerun.kernels.cpu.emit import Module
from forerun.kernels.cpu.loops import write_loops
from forerun.kernels.cpu.machine import Body, Code, chosen_body, source_key
from forerun.kernels.cpu.products import FloatProducts, ProductWriter, write_rounding
from forerun.kernels.cpu.threads import LoopCall, Program, Threads, write_threads
from forerun.kernels.cpu.tiles import Tiles
from forerun.kernels.parts import WeightPart

WRITERS = (
    attention,
    emit,
    layout,
    loops,
    machine,
    products,
    repacking,
    threads,
)  # modules that the compiled code depends on


class Library:
    """Functions of one body by what they do. Each module is compiled when it is first asked for, and kept on disk."""

    def __init__(self, body: Body, folder: Path | None, most_threads: int) -> None:
        self.body, self._folder = body, folder
        self._key = source_key(str(module.__file__) for module in WRITERS)
        self._codes: dict[str, Code] = {}
        self.threads = Threads(self._code("base", self._write_base), most_threads)

    def loop(self, name: str) -> int:
        """The address of one of the small loops."""
        return self._code("base", self._write_base).address(name)

    def product(self, tiles: Tiles) -> int:
        """The address of the product with such weights."""

        def write(module: Module) -> None:
            if tiles.format is None:
                FloatProducts(module, self.body, tiles.kind).write()
            else:
                ProductWriter(module, self.body, tiles.format, tiles.name).write()

        return self._code(f"product {tiles.format} {tiles.kind}", write).address(f"product_{tiles.name}")

    def attention(self, size: int, page: int) -> int:
        """The address of attention with such heads and pages."""

        def write(module: Module) -> None:
            Attention(module, self.body, size, page).write()

        return self._code(f"attention {size} {page}", write).address(attention.name_of(size, page))

    def repack(self, part: WeightPart, tiles: Tiles) -> bool:
        """Write a part's blocks into its tiles; False where there is no compiled loop for its format."""
        name, format = part.format.name, tiles.format
        if name not in repacking.LAYOUTS or format is None:
            return False
        part.check()
        raw = part.raw if part.raw.strides[-1] == 1 else np.ascontiguousarray(part.raw)
        code = self._code(f"repack {name}", lambda module: repacking.write_repacking(module, name, format))
        one = np.ones(1, np.int32)
        row_map = None if part.row_map is None else np.ascontiguousarray(part.row_map, np.int64)
        per_piece = max(1, len(tiles.data) // 64)
        arguments = np.array(
            [
                *(one.ctypes.data, raw.ctypes.data, raw.strides[0], 0 if row_map is None else row_map.ctypes.data),
                *(tiles.outs, tiles.groups, tiles.data.ctypes.data, per_piece),
            ],
            np.int64,
        )
        pieces = -(-len(tiles.data) // per_piece)
        program = Program([[LoopCall(code.address(f"repack_{name}"), arguments, one.ctypes.data, pieces, 1, "repack")]])
        program.close()
        self.threads.run(program)
        return True

    def _write_base(self, module: Module) -> None:
        write_rounding(module, self.body)
        write_loops(module)
        write_rotation(module)
        write_threads(module, self.body)

    def _code(self, what: str, write: Callable[[Module], None]) -> Code:
        if what not in self._codes:

            def make() -> str:
                module = Module()
                write(module)
                return module.text()

            self._codes[what] = Code(self.body, f"{self._key} {what}", make, self._folder)
        return self._codes[what]


def thread_count() -> int:
    """As many as there are processors to use, or as the user says for all of the process."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit():
        return max(1, int(named))
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = processors()
    return max(1, here if allowed is None else min(here, int(allowed)))


@cache
def library_of(body: Body, folder: Path, most_threads: int) -> Library:
    """One for the process: compiled code and threads are shared by all models."""
    return Library(body, folder, most_threads)


def library() -> Library:
    """The code for this machine, or for the body that the environment names."""
    return library_of(chosen_body(), forerun_home() / "code", thread_count())
