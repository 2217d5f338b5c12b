"""Memory of this machine: how much there is to take, how much a user wants taken, and giving it back."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

from forerun.cgroups import memory_left, number
from forerun.errors import ForerunError

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)


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


def wanted_memory(given: object) -> int | float | None:
    """Bytes (an int) or a share of what is free (a float): 0.5, "512M", "6G"; a number up to 1 is a share."""
    if given is None:
        return None
    found = SIZE.fullmatch(str(given).strip())
    if found is not None and not isinstance(given, bool):
        value, unit = float(found[1]), found[2].upper()
        if not unit and 0 < value <= 1:
            return value
        if value > 0 and (unit or value.is_integer()):
            return int(value * 1024 ** " KMGT".index(unit or " "))
    raise ForerunError(f"memory must be a share of what is free (0.5) or bytes (512M, 6G), not {given!r:.60}")
