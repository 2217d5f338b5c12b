"""Buffers side by side in memory: one copy moves all of them from the host to a device."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

STAGES = 8  # copies that may wait for the device at once: a few of the round under way, and as many of the next one


class Packed:
    """By name: `here` as arrays, `there` as tensors of the same shape."""

    def __init__(self, device: torch.device, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        sizes = {name: kind.itemsize * prod(shape) for name, (kind, shape) in fields.items()}
        room = [size + -size % 16 for size in sizes.values()]
        pinned = device.type == "cuda"
        self._there = torch.zeros(sum(room), dtype=torch.uint8, device=device)
        self._here = torch.zeros(sum(room), dtype=torch.uint8)
        self._stages = [torch.zeros(sum(room), dtype=torch.uint8, pin_memory=pinned) for _ in range(STAGES)]
        self.there: dict[str, Tensor] = {}
        self.here: dict[str, Any] = {}  # numpy arrays
        starts = [sum(room[:index]) for index in range(len(room))]
        for start, (name, (kind, shape)) in zip(starts, fields.items(), strict=True):
            part = slice(start, start + sizes[name])
            self.there[name] = self._there[part].view(kind).view(shape)
            self.here[name] = self._here[part].view(kind).view(shape).numpy()

    def send(self) -> None:
        """All that was written here; what is written afterwards does not reach a copy that still waits."""
        self._stages.append(self._stages.pop(0))
        self._there.copy_(self._stages[-1].copy_(self._here), non_blocking=True)
