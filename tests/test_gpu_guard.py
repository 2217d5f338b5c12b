"""On a machine with several GPUs work is launched on the one that holds the data."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
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
    """Or it is called by functions of its file alone that are."""
    found = 0
    folder = Path(forerun.kernels.gpu.__file__).parent
    for file in folder.glob("*.py"):
        module = importlib.import_module(f"forerun.kernels.gpu.{file.stem}")
        functions = {n: f for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
        guarded = {name for name, function in functions.items() if inspect.unwrap(function) is not function}
        for name, function in functions.items():
            if "launch_pdl=" in inspect.getsource(inspect.unwrap(function)):
                found += 1
                calls = {other for other, one in functions.items() if calls_it(inspect.unwrap(one), name)}
                mine = name in guarded or (name.startswith("_") and calls and calls <= guarded)
                assert mine, f"{file.stem}.{name} launches on whatever GPU is the current one"
    assert found >= 12


def calls_it(function: Callable[..., object], name: str) -> bool:
    return re.search(rf"(?<!def )\b{name}\(", inspect.getsource(function)) is not None
