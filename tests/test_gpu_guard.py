"""On a machine with several GPUs work is launched on the one that holds the data."""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

import forerun.kernels.gpu
from forerun.kernels.gpu import guard

pytestmark = pytest.mark.kernels


def test_a_launch_runs_on_the_device_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    def enter(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(guard, "current", enter)
    x = torch.zeros(3, device="meta")
    assert guard.on_its_device(lambda tensor, number: number)(x, 5) == 5
    assert entered == [torch.device("meta")]


def test_every_function_that_launches_is_guarded() -> None:
    """Whatever is imported from outside and has a launch in it."""
    found = 0
    folder = Path(forerun.kernels.gpu.__file__).parent
    for file in folder.glob("*.py"):
        module = importlib.import_module(f"forerun.kernels.gpu.{file.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            unwrapped = inspect.unwrap(function)
            if function.__module__ == module.__name__ and "launch_pdl=" in inspect.getsource(unwrapped):
                found += 1
                assert unwrapped is not function, f"{file.stem}.{name} launches on whatever GPU is the current one"
    assert found >= 12
