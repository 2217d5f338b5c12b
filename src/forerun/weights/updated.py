"""A checkpoint some of whose tensors were replaced in memory: a trainer's, between two rounds of rollouts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forerun.errors import ForerunError
from forerun.weights.checkpoint import SCALE, Checkpoint

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them


class UpdatedCheckpoint(Checkpoint):
    """`base` with these tensors, which are copied: a trainer goes on changing its own."""

    def __init__(self, base: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
        if type(base) not in (Checkpoint, UpdatedCheckpoint):
            raise ForerunError(f"{base.path} is not read from safetensors, and only the weights of such are updated")
        super().__init__(base.path, base.config, [])
        self._handles |= base._handles
        for name, tensor in tensors.items():
            if not base.has(name):
                raise ForerunError(f"{base.path} has no tensor {name}: weights are updated by the names of its files")
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in NAMES:
                raise ForerunError(f"{name} must be a tensor of float32, bfloat16 or float16, not {tensor!r:.60}")
            if tuple(tensor.shape) != base.shape(name):
                raise ForerunError(f"{name} must have the shape {base.shape(name)}, not {tuple(tensor.shape)}")
            self._handles[name] = _InMemory(tensor.detach().to("cpu", copy=True).contiguous()), name
            self._handles.pop(name + SCALE, None)  # from now on it is not stored in 8 bits


class _InMemory:
    """One tensor, as an open file of safetensors gives it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, name: str) -> torch.Tensor:  # noqa: ARG002
        return self._tensor

    def get_slice(self, name: str) -> _InMemory:  # noqa: ARG002
        return self

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return NAMES[self._tensor.dtype]
