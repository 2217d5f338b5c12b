"""Where a model runs and in which precision: wishes in, decisions out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forerun.errors import ForerunError
from forerun.kernels.interface import Kernels
from forerun.kernels.reference import ReferenceKernels
from forerun.memory import available_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the memory that is free when the weights are there: what the cache takes.
CPU_CACHE_SHARE = 0.25  # at most: other programs live there too
GPU_CACHE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """The decisions."""

    device: torch.device
    dtype: torch.dtype
    quantize: bool
    kernels: Kernels
    graphs: bool = False  # passes are described on the device and replayed from captured graphs

    def describe(self) -> str:
        """Precision in a word."""
        return "int8" if self.quantize else str(self.dtype).removeprefix("torch.")


def plan_machine(device: str, dtype: str, quantize: str) -> Machine:
    """Check the wishes against the machine. On CPU int8 weights are the default; elsewhere bfloat16."""
    if quantize not in ("auto", "none", "int8"):
        raise ForerunError(f"quantize must be none or int8, not {quantize!r}")
    if dtype != "auto" and dtype not in DTYPES:
        raise ForerunError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and triton_works() else "cpu"
    where = named_device(device, ("cpu", "cuda", "mps"))
    if where.type == "cpu":
        return _cpu(where, dtype, quantize)
    if quantize == "int8":
        raise ForerunError(f"int8 weights are not supported on {where.type}: use --quantize none (bfloat16)")
    precision = torch.bfloat16 if dtype == "auto" else DTYPES[dtype]
    if where.type == "cuda" and triton_works():
        from forerun.kernels.cuda import CudaKernels

        return Machine(where, precision, False, CudaKernels(where), graphs=True)
    # Apple GPUs, and CUDA without Triton: the slow, obvious bodies.
    return Machine(where, precision, False, ReferenceKernels())


def triton_works() -> bool:
    """Triton comes with torch for CUDA on Linux; elsewhere it may be missing."""
    return importlib.util.find_spec("triton") is not None


def named_device(name: str, kinds: Sequence[str]) -> torch.device:
    """A device of one of these kinds that is there."""
    known = f"use auto, {', '.join(kinds[:-1])} or {kinds[-1]}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ForerunError(f"unknown device {name!r}: {known}") from None
    if device.type not in kinds:
        raise ForerunError(f"device {name!r} is not supported: {known}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ForerunError("no CUDA device was found: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ForerunError(f"there is no device {name}: the last one is cuda:{count - 1}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ForerunError("no Apple GPU was found: use --device cpu")
    return device


def _cpu(device: torch.device, dtype: str, quantize: str) -> Machine:
    if dtype not in ("auto", "float32"):
        raise ForerunError(
            f"{dtype} is not supported on the CPU: use --dtype float32 (or leave it and use int8 weights)"
        )
    # An explicit float32 with no word on quantising means full precision.
    small = quantize == "int8" or (quantize == "auto" and dtype == "auto")
    from forerun.kernels.cpu import CpuKernels

    return Machine(device, torch.float32, small, CpuKernels(small))


def free_memory(device: torch.device) -> int:
    """Bytes that are free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_memory()
    return 8 << 30 if available is None else available  # macOS and Windows do not say: a modest guess


def out_of_memory(error: BaseException) -> bool:
    """Is that what an error says? A CPU's allocator has no class of its own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextmanager
def running_memory() -> Iterator[None]:
    """Out of memory beside a loaded model becomes a line that says what to do."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        place = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "the machine"
        raise ForerunError(
            f"{place} is out of memory: load with a smaller max context or no draft model, or close programs"
        ) from error
