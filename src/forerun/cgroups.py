"""What a container may use of its machine, as Linux's control groups tell it: memory and processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Names of the files with a group's limit and usage, and the line of memory.stat that counts what is given up at once.
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def memory_left(root: Path) -> Iterator[int]:
    """Bytes that each control group which this process is in has left."""
    for folder, second in _groups(root, "memory"):
        names = VERSION_2 if second else VERSION_1
        limit, used = number(folder / names[0]), number(folder / names[1])
        if limit is not None and used is not None:  # "max" is no number: no limit
            yield limit - used + (number(folder / "memory.stat", names[2]) or 0)


def processors(root: Path = Path("/")) -> float | None:
    """How many a container may keep busy, which is fewer than it sees; None: all of them."""
    shares = list(_shares(root))
    return min(shares) if shares else None


def _shares(root: Path) -> Iterator[float]:
    for folder, second in _groups(root, "cpu"):
        if second:
            found = re.match(r"(\d+) (\d+)$", text(folder / "cpu.max"), re.MULTILINE)
            quota, period = (int(found[1]), int(found[2])) if found else (None, None)
        else:
            quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if quota and period:  # "max", or -1 in the first version: no limit
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the groups that have a say, parents too, whose limits hold as well; is it the second version?"""
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(base):
                break
            yield folder, controllers == ""


def number(file: Path, name: str = "") -> int | None:
    """The number after `name` at the beginning of a line, or the one that is all of the file."""
    found = re.search(rf"^{name}:?\s*(\d+)\b", text(file), re.MULTILINE)
    return int(found[1]) if found else None


def text(file: Path) -> str:
    """Of a file that may not be there."""
    try:
        return file.read_text()
    except OSError:
        return ""
