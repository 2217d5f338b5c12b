"""Wishes about the device, checked against the machine."""

from __future__ import annotations

import pytest
import torch

from forerun.device import named_device, plan_machine
from forerun.errors import ForerunError


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("abacus", "unknown device 'abacus': use auto, cpu, cuda or mps"),
        ("xpu", "device 'xpu' is not supported: use auto, cpu, cuda or mps"),
        ("cuda:2", "there is no device cuda:2: the last one is cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ForerunError, match=told):
        plan_machine(name, "auto", "auto")
    for there in ("cuda", "cuda:0", "cuda:1", "cpu"):
        assert named_device(there, ("cpu", "cuda")) == torch.device(there)
