"""Triton launches on the current GPU, whatever its arguments' is: launches happen with theirs as the current one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within it, `device` is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_its_device(launch: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`launch` runs on the device of its first tensor."""

    @wraps(launch)
    def guarded(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        first = next(each for each in arguments if isinstance(each, Tensor))
        with current(first.device):
            return launch(*arguments, **named)

    return guarded
