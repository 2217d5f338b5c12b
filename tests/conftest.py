"""Helpers of the tests are importable by name. Without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from forerun.weights.home import forerun_home

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:  # it exists for Linux only
    collect_ignore_glob = ["test_gpu_*.py", "test_device_*.py"]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


def let_the_interpreter_count() -> None:
    """Its numbers are arrays of one element, which numpy from 2.4 on does not take for the bound of a loop."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    usual = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not torch.cuda.is_available():
    let_the_interpreter_count()


@pytest.fixture(autouse=True, scope="session")
def home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests learn about costs stays with them; converted models are shared with the user's own."""
    converted = forerun_home() / "gguf"
    converted.mkdir(parents=True, exist_ok=True)
    home = tmp_path_factory.mktemp("home")
    (home / "gguf").symlink_to(converted)
    os.environ["FORERUN_HOME"] = str(home)
