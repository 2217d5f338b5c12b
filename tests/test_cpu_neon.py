"""The bodies for ARM: compiled here for another machine, and run where an emulator of it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_bodies import FIRST, kernels_of, packed, stored
from llvmlite import binding

from forerun.kernels.cpu.attention import ATTEND, ROTATE, Attention, name_of, write_rotation
from forerun.kernels.cpu.emit import Module
from forerun.kernels.cpu.layout import RECORD
from forerun.kernels.cpu.loops import ARGUMENTS, write_loops
from forerun.kernels.cpu.machine import BODIES, Body, compile_ir
from forerun.kernels.cpu.ops import word_of
from forerun.kernels.cpu.products import FloatProducts, ProductWriter, write_rounding
from forerun.kernels.cpu.threads import IDLE, SHARED_BYTES, STAGE, STAGE_WORDS, TICKET, LoopCall, Program, write_threads
from forerun.kernels.cpu.tiles import Tiles

NEON = [body for body in BODIES if body.triple == "aarch64"]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross (Debian's names)"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
BASE = 0x2000000000  # where the other machine's memory lies
FORMATS = ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q3_k", "q5_k", "q6_k", "iq4_xs", "mxfp4"]
FORMATS += ["mlx8_64"]
HEADS = ((16, 8), (20, 8), (64, 64))  # size, page


def machine_for(body: Body) -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    return target.create_target_machine(cpu=body.cpu, features=body.features, opt=3, reloc="static", codemodel="small")


def code(body: Body, tiles: Sequence[Tiles], heads: Sequence[tuple[int, int]]) -> str:
    """Everything that a model may need, in one module."""
    module = Module()
    write_rounding(module, body)
    write_loops(module)
    write_rotation(module)
    write_threads(module, body)
    for each in tiles:
        if each.format is None:
            FloatProducts(module, body, each.kind).write()
        else:
            ProductWriter(module, body, each.format, each.name).write()
    for size, page in heads:
        Attention(module, body, size, page).write()
    return module.text()


@dataclass
class Step:
    """One loop, as a stage of its own."""

    name: str
    arguments: int
    rows: int
    pieces: int
    rows_per_piece: int


class Image:
    """Memory with inputs, arguments and room for results, the same bytes wherever it begins but for its addresses."""

    def __init__(self, base: int, room: np.ndarray) -> None:
        self.base, self.room, self.used = base, room, 0
        self.steps: list[Step] = []
        self.results: list[tuple[str, int, int]] = []

    def put(self, array: np.ndarray) -> int:
        """Its address."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start, self.used = self.used, self.used + len(data) + 64 + -len(data) % 64
        self.room[start : start + len(data)] = data
        return self.base + start

    def result(self, name: str, *shape: int) -> int:
        """Room for float32 or bytes that are compared."""
        address = self.put(np.zeros(shape, np.float32))
        self.results.append((name, address - self.base, 4 * int(np.prod(shape))))
        return address

    def step(self, name: str, words: dict[str, int], names: Sequence[str], pieces: int = 1, per: int = 2) -> None:
        arguments = np.array([words.get(each, 0) for each in names], np.int64)
        self.steps.append(Step(name, self.put(arguments), words["rows"], pieces, per))

    def found(self) -> dict[str, bytes]:
        return {name: self.room[start : start + size].tobytes() for name, start, size in self.results}


def fill(image: Image, tiles: Sequence[Tiles]) -> None:
    """Every loop, on random rows."""
    noise, rows, n = np.random.default_rng(0), 11, 512

    def floats(*shape: int) -> int:
        return image.put(noise.normal(size=shape).astype(np.float32))

    count, x, stride = image.put(np.array([rows], np.int32)), floats(rows, n), 4 * n
    records = image.result("round", rows, n // 32 * RECORD // 4)
    common = {"rows": count, "per_piece": 2, "x": x, "xs": stride, "n": n - 3, "eps": word_of(1e-5), "os": stride}
    image.step("round", common | {"n": n, "records": records, "rs": n // 32 * RECORD}, ARGUMENTS["round"])
    other = {"weight": floats(n), "up": floats(rows, n), "us": stride, "before": floats(rows, n), "bs": stride}
    other |= {"factor": word_of(0.7), "js": stride, "join_norm": floats(n)}
    other |= {"joined_norm": floats(n), "other": floats(rows, n), "ts": stride, "gate": floats(rows, n), "gs": stride}
    other |= {"which": image.put(noise.integers(0, rows, 32)), "cap": word_of(3.0)}
    for name in ("norm", "silu", "gelu", "gather", "copy", "sum", "sigmoid"):
        own = {"out": image.result(name, rows, n), "x": floats(rows, n)}
        image.step(name, common | other | own, ARGUMENTS[name])
    # These change what they read: a run that follows must find what the first one found.
    joined = {"joined": floats(rows, n), "out": image.result("add_norm", rows, n), "x": floats(rows, n)}
    for name in ("joined", "x"):
        image.step("copy", common | {"out": joined[name], "x": floats(rows, n)}, ARGUMENTS["copy"])
    image.step("add_norm", common | other | joined, ARGUMENTS["add_norm"])
    for name in ("cap", "never"):
        own = {"x": image.result(name, rows, n), "count": 4}
        image.step("copy", common | {"out": own["x"]}, ARGUMENTS["copy"])
        image.step(name, common | other | own, ARGUMENTS[name])
    names = ["rows", "x", "xs", "tiles", "groups", "out", "os", "outs", "tiles_per_piece", "rows_per_piece"]
    names += ["bias", "before"]
    for each in tiles:
        source = (x, stride) if each.format is None else (records, n // 32 * RECORD)
        words = {"rows": count, "x": source[0], "xs": source[1], "tiles": image.put(each.data), "groups": each.groups}
        words |= {"out": image.result(f"product {each.name}", rows, 40), "os": 40, "outs": each.outs}
        words |= {"tiles_per_piece": 2, "rows_per_piece": 6, "bias": floats(40), "before": floats(rows, 40)}
        image.step(f"product_{each.name}", words, names, -(-len(each.data) // 2), 6)
    for size, page in HEADS:
        fill_attention(image, floats, size, page)


def fill_attention(image: Image, floats: Callable[..., int], size: int, page: int) -> None:
    """Twelve rows of one sequence that has 70 keys before them, six heads on two key heads."""
    rows, pages, width = 12, 12, 10 * size
    x = image.result(f"rotated {size}", rows, width)
    count, tiles = image.put(np.array([rows], np.int32)), image.put(np.array([2], np.int32))
    position = np.arange(70, 70 + rows, dtype=np.int32)
    words = {"rows": count, "per_piece": 2, "x": x, "xs": 4 * width, "heads": 6, "kv_heads": 2, "size": size}
    words |= {"half": size // 2, "cos": image.put(np.array([floats(90, size // 2)])), "page": page, "shared": 3}
    words |= {"sin": image.put(np.array([floats(90, size // 2)])), "owner": image.put(np.zeros(rows, np.int32))}
    words |= {"position": image.put(position), "stop": image.put(position + 1), "scale": word_of(size**-0.5)}
    words |= {"table": image.put(np.array([image.put(np.arange(pages, dtype=np.int32))]))}
    words |= {"table_stride": image.put(np.array([pages])), "keys": floats(pages, 2, size, page)}
    words |= {"values": floats(pages, 2, page, size), "query_norm": floats(size), "key_norm": floats(size)}
    words |= {"eps": word_of(1e-6), "tiles": image.put(np.array([[0, 7], [7, 5]], np.int32)), "os": 24 * size}
    image.step("copy", words | {"x": floats(rows, width), "n": width, "out": x, "os": 4 * width}, ARGUMENTS["copy"])
    image.step("rotate", words, ROTATE)
    for name, more in (("", {}), ("capped ", {"softcap": word_of(2.0), "window": 20})):
        words |= {"out": image.result(f"{name}attention {size}", rows, 6 * size), **more}
        image.step(name_of(size, page), words | {"rows": tiles}, ATTEND, 2, 1)


def run_here(tiles: Sequence[Tiles]) -> dict[str, bytes]:
    """By the first body of this machine."""
    library, room = kernels_of(FIRST).library, np.zeros(16 << 20, np.uint8)
    start = -room.ctypes.data % 64
    image = Image(room.ctypes.data + start, room[start:])
    fill(image, tiles)
    addresses = {f"product_{each.name}": library.product(each) for each in tiles}
    addresses |= {name_of(*heads): library.attention(*heads) for heads in HEADS}
    program = Program()
    for step in image.steps:
        arguments = image.room[step.arguments - image.base :][: 8 * 32].view(np.int64)
        function = addresses.get(step.name) or library.loop(step.name)
        program.stages.append([LoopCall(function, arguments, step.rows, step.pieces, step.rows_per_piece)])
    program.close()
    library.threads.run(program)
    return image.found()


def run_emulated(body: Body, tiles: Sequence[Tiles], folder: Path, threads: int, runs: int) -> dict[str, bytes]:
    """On the other machine."""
    image = Image(BASE, np.zeros(16 << 20, np.uint8))
    fill(image, tiles)
    names = sorted({step.name for step in image.steps})
    table = np.zeros((len(image.steps), STAGE_WORDS), np.int64)
    for row, step in zip(table, image.steps, strict=True):
        words = [1, names.index(step.name), step.arguments, step.rows, step.pieces, step.rows_per_piece]
        row[: len(words)] = words
    shared = np.zeros(SHARED_BYTES // 8, np.int64)
    shared[TICKET // 8] = IDLE << STAGE
    head = [BASE, len(image.room), image.put(table), len(table), STAGE_WORDS, image.put(shared), threads, runs]
    program = folder / f"{body.name}-program"
    if not program.exists():
        (folder / "code.o").write_bytes(compile_ir(machine_for(body), code(body, tiles, HEADS)))
        declared = "".join(f"void {name}(void *, long);\n" for name in names)
        listed = ", ".join(f"(void *){name}" for name in names)
        (folder / "names.c").write_text(f"{declared}void *const functions[] = {{{listed}}};\n")
        files = [Path(__file__).parent / "data" / "neon.c", folder / "names.c", folder / "code.o"]
        subprocess.run([COMPILER, "-O1", "-static", "-pthread", "-fno-builtin", *files, "-o", program], check=True)
    given = np.array(head, np.int64).tobytes() + image.room.tobytes()
    done = subprocess.run([EMULATOR, "-cpu", "max", program], input=given, capture_output=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr.decode()}"
    image.room = np.frombuffer(done.stdout, np.uint8)
    return image.found()


@pytest.mark.parametrize("body", NEON, ids=lambda body: body.name)
def test_the_code_is_for_the_instructions_it_is_named_after(body: Body) -> None:
    """And for none that could not run in a process of its own: counters of cycles belong to the kernel."""
    machine = machine_for(body)
    text = machine.emit_assembly(binding.parse_assembly(code(body, [packed(stored("q4_0", 16, 64))], ())))
    assert ("usdot" if body.dot == "usdot" else "sdot") in text and "fmla" in text
    assert "pmccntr" not in text.lower() and "fmaf" not in text.lower()


@pytest.mark.long
@pytest.mark.skipif(bool(MISSING), reason="not run without " + PACKAGES)
@pytest.mark.parametrize("body", NEON, ids=lambda body: body.name)
def test_arm_gives_the_same_bits(body: Body, tmp_path: Path) -> None:
    tiles = [packed(stored(name, 40, 512)) for name in FORMATS]
    wanted = run_here(tiles)
    for threads, runs in ((1, 1), (2, 20)):
        found = run_emulated(body, tiles, tmp_path, threads, runs)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if found[name] != wanted[name]] == []
        assert all(any(part) for part in wanted.values())
