"""torch's worker threads on a CPU: how many, and when they go."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType

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


class one_worker:
    """Within it torch's operations of this thread run on it alone: they are small, and each would wait for a worker
    that a busy machine does not run. Other threads keep theirs, which `torch.set_num_threads` would not let them.
    """

    _before = 0

    def __enter__(self) -> None:
        set_threads = _library_function("omp_set_num_threads")
        if set_threads is not None:
            self._before = torch.get_num_threads()  # of this thread; it is told how many on its first question
            set_threads(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_threads = _library_function("omp_set_num_threads")
        if self._before and set_threads is not None:
            set_threads(self._before)


def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all`; None where the library is not GNU's."""
    # LLVM's would stop everybody's workers.
    return None if _library_function("__kmpc_fork_call") else _library_function("omp_pause_resource_all")


@cache
def _library_function(name: str) -> Callable[[int], int] | None:
    """Of the OpenMP that torch computes with."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not path.exists():
        return None
    return getattr(ctypes.CDLL(str(path)), name, None)  # finds what it depends on, too
