"""Bodies of all operations on a CPU."""

from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.cpu.recording import Recorder, Recording

__all__ = ["CpuKernels", "Recorder", "Recording"]
