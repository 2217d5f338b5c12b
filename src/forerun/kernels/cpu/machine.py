"""What this CPU can do, and machine code for it: LLVM IR in, callable addresses out, kept on disk between runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError

BODY_VARIABLE = "FORERUN_CPU"  # names a body from the list below; the widest that the CPU has is the default


@dataclass(frozen=True, slots=True)
class Body:
    """One way to write the inner loops: an instruction set and the vectors it works on."""

    name: str
    lanes: int  # 32-bit lanes of a vector
    registers: int
    dot: str  # how four products of bytes are added to a 32-bit lane
    triple: str  # the architecture in LLVM's words
    cpu: str
    features: str
    needs: tuple[str, ...]  # features of the CPU, in LLVM's words


BODIES = (
    Body("avx512", 16, 32, "vnni", "x86_64", "x86-64-v4", "+avx512vnni", ("avx512vnni", "avx512bw", "avx512vl")),
    Body("avxvnni", 8, 16, "vnni", "x86_64", "x86-64-v3", "+avxvnni", ("avxvnni", "avx2", "fma", "f16c")),
    Body("avx2", 8, 16, "maddubs", "x86_64", "x86-64-v3", "", ("avx2", "fma", "f16c")),
    Body("i8mm", 4, 32, "usdot", "aarch64", "generic", "+i8mm,+dotprod,+fullfp16", ("i8mm", "dotprod")),
    Body("dotprod", 4, 32, "sdot", "aarch64", "generic", "+dotprod,+fullfp16", ("dotprod",)),
    Body("portable", 4, 16, "plain", "", "", "", ()),
)

NAMED_ALSO = {"aarch64": "arm64"}  # by Apple


@cache
def usable_bodies() -> tuple[Body, ...]:
    """The bodies that this machine can run, the fastest first."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    here = binding.get_process_triple()
    return tuple(
        body
        for body in BODIES
        if (not body.triple or here.startswith((body.triple, NAMED_ALSO.get(body.triple, body.triple))))
        and all(features.get(need, False) for need in body.needs)
    )


def chosen_body() -> Body:
    """The body that the environment names, or the fastest that runs here."""
    usable = usable_bodies()
    wanted = os.environ.get(BODY_VARIABLE, "")
    if not wanted:
        return usable[0]
    found = next((body for body in usable if body.name == wanted), None)
    if found is None:
        known = ", ".join(body.name for body in usable)
        raise ForerunError(f"{BODY_VARIABLE}={wanted[:40]!r} is not a body that runs on this CPU; it has {known}")
    return found


class Code:
    """Compiled functions by name. Loading takes milliseconds where the same code was compiled before."""

    def __init__(self, body: Body, key: str, make: Callable[[], str], folder: Path | None) -> None:
        """`key` stands for everything that `make`, which writes the IR, depends on."""
        from llvmlite import binding

        self.body = body
        machine = target_machine(body)
        version = ".".join(map(str, binding.llvm_version_info))
        name = hashlib.sha256("\n".join([key, repr(body), machine.triple, version]).encode()).hexdigest()[:32]
        kept = None if folder is None else folder / f"{body.name}-{name}.o"
        data = None if kept is None else kept_before(kept)
        if data is None:
            data = compile_ir(machine, make())
            if kept is not None:
                keep(kept, data)
        self._engine = self._load(machine, data)

    def _load(self, machine: Any, data: bytes) -> Any:
        from llvmlite import binding

        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        engine.add_object_file(binding.ObjectFileRef.from_data(data))
        engine.finalize_object()
        return engine

    def address(self, name: str) -> int:
        """Of a function."""
        found: int = self._engine.get_function_address(name)
        assert found, name
        return found

    def function(self, name: str, arguments: Sequence[Any], result: Any = None) -> Callable[..., Any]:
        """Callable from Python; the interpreter goes on with other threads while it runs."""
        return ctypes.CFUNCTYPE(result, *arguments)(self.address(name))


def target_machine(body: Body) -> Any:
    """LLVM's compiler for a body: never for more than the body names, so that a narrow body is narrow everywhere."""
    from llvmlite import binding

    with suppress(RuntimeError):
        binding.initialize()  # newer versions do it themselves, and say so
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(cpu=body.cpu, features=body.features, opt=3, codemodel="jitdefault", jit=True)


def compile_ir(machine: Any, text: str) -> bytes:
    """Object code of a module."""
    from llvmlite import binding

    module = binding.parse_assembly(text)
    module.verify()
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = False  # vectors are written out; what is left runs once per block or piece
    tuning.slp_vectorization = False
    tuning.loop_unrolling = False
    builder = binding.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    data: bytes = machine.emit_object(module)
    return data


def keep(file: Path, data: bytes) -> None:
    """For the next start; a full disk is no reason not to run what has been compiled."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(data).digest() + data)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise


def kept_before(file: Path) -> bytes | None:
    """What was kept; None where there is nothing, or where it is damaged: LLVM would crash on that."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    data = whole[size:]
    return data if hashlib.sha256(data).digest() == whole[:size] else None


def source_key(modules: Iterable[str]) -> str:
    """The text of the modules that write IR: other text, other code."""
    total = hashlib.sha256()
    for name in modules:
        total.update(Path(name).read_bytes())
    return total.hexdigest()
