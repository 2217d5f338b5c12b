"""Memory of this machine: how much there is to take, and giving it back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from forerun.cgroups import memory_left, number


def return_freed_memory() -> None:
    """Give the system back what was freed, out of the middle of what the GNU C library keeps too.

    Logits of batches have another size in every round: among blocks that are in use they leave holes, and a server that
    runs for hours grows by these. It takes some milliseconds, and pages that are wanted again some more.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a program may take without swapping; None where /proc does not say. Cached files count as free."""
    whole = number(root / "proc/meminfo", "MemAvailable")
    if whole is None:
        return None
    return max(0, min([whole * 1024, *memory_left(root)]))
