"""Compiled code is kept where that is possible, and runs where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from forerun.compilation import jit

@jit({signature})
def twice(number):
    return 2 * number
"""


@pytest.mark.parametrize("signature", ["", "'int64(int64)'"])
@pytest.mark.parametrize("room", [None, 100])  # bytes of a file: less than any compiled function has
def test_a_full_disk_keeps_nobody_from_running(tmp_path: Path, room: int | None, signature: str) -> None:
    pytest.importorskip("resource")
    (tmp_path / "module.py").write_text(MODULE.format(signature=signature))
    program = "import sys, resource, forerun.compilation\n"
    if room is not None:
        program += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
    program += "from module import twice\nsys.exit(twice(21))"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 42, done.stderr
    kept = [file for file in (tmp_path / "cache").rglob("*.nbi") if file.is_file()]
    assert bool(kept) == (room is None)
