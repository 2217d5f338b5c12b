"""torch's worker threads on a CPU, which GNU's OpenMP keeps for every thread that ever computed something."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOFT = 1  # omp_pause_soft


def release_workers() -> None:
    """Let the worker threads of the calling one go; its next computation makes new ones, in a tenth of a millisecond.

    Once there are more of them than cores, counting those of threads that compute nothing any more, GNU's OpenMP puts
    a worker to sleep between any two operations. A pass is hundreds of operations, and takes twice as long then.
    """
    pause = _pause()
    if pause is not None:
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the library that torch computes with; None where that is not GNU's."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not path.exists():
        return None
    library = ctypes.CDLL(str(path))  # finds what it depends on, too
    if hasattr(library, "__kmpc_fork_call"):  # LLVM's would stop everybody's workers
        return None
    pause: Callable[[int], int] | None = getattr(library, "omp_pause_resource_all", None)
    return pause
