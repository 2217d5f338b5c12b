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
