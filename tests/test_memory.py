"""Free memory of the host: cached files are free, and a container's limit counts."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.memory import available_memory

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


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
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


HELD = """
import ctypes
from forerun.memory import LARGE, return_large_blocks

class Numbers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena parts small mapped rest1 rest2 rest3 used free top".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype, libc.free.argtypes = Numbers, ctypes.c_void_p, [ctypes.c_void_p]
told = {told} and return_large_blocks()
libc.free(libc.malloc(3 * LARGE))  # from now on it would keep blocks of that size
before = libc.mallinfo2().mapped
block = libc.malloc(2 * LARGE)
print(told, libc.mallinfo2().mapped - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the GNU C library's own numbers"
)
@pytest.mark.parametrize("told", [False, True])
def test_large_blocks_go_back_at_once(told: bool) -> None:
    """Mapped one by one, not cut out of what the process keeps. It is a setting of the whole process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HELD.replace("{told}", str(told))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == [str(told), str(int(told))]


TOUCHED = """
import ctypes, resource, threading
from forerun.memory import LARGE, return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
assert return_large_blocks()

def rounds(count):
    for _ in range(count):
        block = libc.malloc(1 << 20)
        libc.memset(block, 1, 1 << 20)
        libc.free(block)

def work():
    rounds(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rounds(100)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the GNU C library's own numbers"
)
def test_smaller_blocks_stay() -> None:
    """An engine's thread takes and frees a megabyte in every layer: its pages are not to go back each time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TOUCHED]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) < 100 * 16  # a block has 256 pages


def test_machines_that_do_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_this_machine_has_some() -> None:
    assert available_memory() is None or available_memory() > 0  # type: ignore[operator]
