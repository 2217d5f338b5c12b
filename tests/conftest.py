"""Helpers of the tests are importable by name. Without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:  # it exists for Linux only
    collect_ignore_glob = ["test_gpu_*.py", "test_device_*.py"]
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    from interpreter import mend_the_interpreter

    mend_the_interpreter()


@pytest.fixture(autouse=True, scope="session")
def home_of_the_tests(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """What tests learn stays with them. Compiled code is kept between runs: its name says what it was made of."""
    home = tmp_path_factory.mktemp("home")
    assert pytestconfig.cache is not None
    (home / "code").symlink_to(pytestconfig.cache.mkdir("code"))
    os.environ["FORERUN_HOME"] = str(home)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of the page."""
    from browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of whole rounds: the interpreter runs one program after another."""
    from forerun.kernels.gpu import attention

    if not torch.cuda.is_available():
        monkeypatch.setattr(attention, "PROGRAMS", 1)
        monkeypatch.setattr(attention, "LEAST_SPLITS", 2)


@pytest.fixture(scope="session")
def gemma_pair(request: pytest.FixtureRequest) -> Path:
    """A folder with a tiny trained `target` and its `assistant`; made once, kept while the script stays the same."""
    import hashlib

    script = Path(__file__).parent.parent / "tools" / "make_gemma_pair.py"
    assert request.config.cache is not None
    kept = request.config.cache.mkdir("gemma-pair") / hashlib.sha256(script.read_bytes()).hexdigest()[:16]
    if not (kept / "done").exists():
        spec = importlib.util.spec_from_file_location("make_gemma_pair", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.make_pair(kept)
        (kept / "done").touch()
    return kept
