"""torch's worker threads on a CPU: how many, and when they go."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

SOFT = 1  # omp_pause_soft


def limit_workers(allowed: float | None) -> None:
    """No more threads than processors that a container may keep busy, unless the user says how many.

    They wait for each other in every operation, and where they are stopped to keep to the limit, all of them wait.
    """
    if allowed is None or "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(min(max(1, int(allowed)), torch.get_num_threads()))


def release_workers() -> None:
    """Let the worker threads of the calling one go; its next computation makes new ones, in a tenth of a millisecond.

    GNU's OpenMP keeps some for every thread that ever computed something. Once they outnumber the cores it puts them to
    sleep between any two operations. Towers of pictures and sounds are hundreds of operations, as training is.
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
