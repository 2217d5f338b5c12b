"""Free memory of the host and its processors: cached files are free, and a container's limits count."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.cgroups import processors
from forerun.memory import available_memory, wanted_memory

SIZES = [
    (None, None), (0.5, 0.5), ("0.5", 0.5), (1, 1.0), ("1", 1.0), (4096, 4096), ("4096", 4096), (6e9, 6 * 10**9),
    ("512M", 512 << 20), ("6G", 6 << 30), ("1.5g", 3 << 29), (" 2 GiB ", 2 << 30), ("7kb", 7 << 10), ("1T", 1 << 40),
]  # fmt: skip
MEMINFO = "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   5000 kB\nInactive(file):    7 kB\n"
MIB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: str, used: int, inactive: int, version: int = 2) -> dict[str, str]:
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    stat = f"anon 5\ninactive_file {inactive if version == 2 else 1}\ntotal_inactive_file {inactive}\nactive_file 77\n"
    return {
        f"{folder}/memory.{names[0]}": f"{limit}\n",
        f"{folder}/memory.{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


V2, V1, CPU = "sys/fs/cgroup", "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu"
INSIDE = {"proc/self/cgroup": "0::/a/b\n"}
OLD = {"proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/1\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 5000 * 1024),
        (INSIDE, 5000 * 1024),
        (INSIDE | group(f"{V2}/a/b", "max", 10, 5), 5000 * 1024),
        (INSIDE | group(f"{V2}/a/b", str(3 * MIB), 2 * MIB, 4096), MIB + 4096),
        (INSIDE | group(f"{V2}/a/b", "max", 1, 0) | group(f"{V2}/a", str(2 * MIB), MIB, 0), MIB),
        (INSIDE | group(V2, str(MIB), MIB // 2, 0), MIB // 2),  # a container that sees the files of its own group only
        (INSIDE | group(f"{V2}/a/b", str(MIB), 2 * MIB, 0), 0),
        (OLD | group(f"{V1}/docker/1", str(2 * MIB), MIB, 512, version=1), MIB + 512),
        (OLD | group(V1, str(2**63 - 4096), MIB, 512, version=1), 5000 * 1024),
    ],
)
def test_what_is_left(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_memory(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (INSIDE, None),
        (INSIDE | {f"{V2}/a/b/cpu.max": "max 100000\n"}, None),
        (INSIDE | {f"{V2}/a/b/cpu.max": "250000 100000\n"}, 2.5),
        (INSIDE | {f"{V2}/a/b/cpu.max": "max 100000\n", f"{V2}/a/cpu.max": "50000 100000\n"}, 0.5),
        (INSIDE | {f"{V2}/cpu.max": "400000 200000\n"}, 2.0),
        (OLD | {f"{CPU}/x/cpu.cfs_quota_us": "-1\n", f"{CPU}/x/cpu.cfs_period_us": "100000\n"}, None),
        (OLD | {f"{CPU}/cpu.cfs_quota_us": "300000\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, 3.0),
    ],
)
def test_processors_of_a_container(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert processors(machine(tmp_path, files)) == expected


HOLES = """
import ctypes
from pathlib import Path
from forerun.memory import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc.free(libc.malloc(24 << 20))  # from now on blocks are cut out of what the process keeps
blocks = [libc.malloc(4 << 20) for _ in range(16)]
for block in blocks:
    libc.memset(block, 1, 4 << 20)
for block in blocks[::2]:
    libc.free(block)
before = held()
{call}
print(before - held())
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="GNU's C library")
@pytest.mark.parametrize("call", ["", "return_freed_memory()"])
def test_freed_memory_goes_back_from_between_what_is_in_use(call: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLES.replace("{call}", call)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    returned = int(found.stdout) >> 20
    assert returned >= 24 if call else returned < 8


@pytest.mark.parametrize(("given", "meant"), SIZES)
def test_a_share_or_bytes(given: object, meant: float | None) -> None:
    """What a number up to 1 means is a share, whether it is typed or given."""
    found = wanted_memory(given)
    assert found == meant and type(found) is type(meant)
