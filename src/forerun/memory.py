"""Memory of this machine: how much there is to take, as Linux tells it, a container's too; and giving it back."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Names of the files with a group's limit and usage, and the line of memory.stat that counts what is given up at once.
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h of the GNU C library numbers them
LARGE = 8 << 20  # bytes: logits of batches are larger, what one sequence needs from layer to layer is smaller


def return_large_blocks() -> bool:
    """Let freed blocks of `LARGE` bytes and more go back to the system at once; False where nobody can be told.

    The GNU C library learns to keep blocks of up to 32 MiB for the next request. Logits of batches have another size
    in every round: among blocks that are in use they leave holes, and a server that runs for hours grows by these.
    Told one size it learns none, so it is told as well to keep twice as much at the end of its memory, as it does of
    itself: else smaller blocks would go back and come again in every layer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE) == 1 and mallopt(M_TRIM_THRESHOLD, 2 * LARGE) == 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a program may take without swapping; None where /proc does not say. Cached files count as free."""
    whole = _number(root / "proc/meminfo", "MemAvailable")
    if whole is None:
        return None
    return max(0, min([whole * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each control group that this process is in has left. A limit of a parent holds as well."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", VERSION_2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", VERSION_1
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(base):
                break
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:  # "max" is no number: no limit
                yield limit - used + (_number(folder / "memory.stat", names[2]) or 0)


def _number(file: Path, name: str = "") -> int | None:
    """The number after `name` at the beginning of a line, or the one that is all of the file."""
    found = re.search(rf"^{name}:?\s*(\d+)\b", _text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
