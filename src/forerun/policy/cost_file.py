"""What rounds cost, kept between runs under `FORERUN_HOME`: one small file per device, model and versions."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

from forerun import __version__
from forerun.policy.costs import Proportions

log = logging.getLogger("forerun")

SELDOM = 10.0  # seconds between two writes, at least: an answer may take less time than writing
CHANGED = 0.1  # a figure that moved by this share is worth writing
LARGEST = 1 << 20  # bytes; a cost file has a few thousand


def machine_facts(device: torch.device, precision: str) -> dict[str, str]:
    """What costs depend on beside the model: the device, how many threads, the precision, and the versions."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {_processor()}",
        "threads": str(torch.get_num_threads()),
        "precision": precision,
        "torch": str(torch.__version__),
        "forerun": __version__,
    }


def _processor() -> str:
    """The name of the processor; Python itself does not know it on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class CostFile:
    """Reads once, writes when something changed. Costs are only a start, so no failure here may stop anybody."""

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        """`facts`: all that costs depend on; other facts mean another file."""
        self.facts = dict(facts)
        name = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:24]
        self.path = folder / f"{name}.json"
        self._written = Proportions()
        self._next = 0.0  # when it may be written again

    def read(self) -> Proportions | None:
        """What an earlier run left, if it can be used."""
        try:
            if self.path.stat().st_size > LARGEST:
                raise ValueError("it is too large")
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["facts"] != self.facts:
                raise ValueError("it belongs to something else")
            found = parse(data)
        except FileNotFoundError:
            return None
        except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            log.warning("%s cannot be used and will be replaced: %s", self.path, error)
            return None
        self._written = found
        return found

    def write(self, proportions: Proportions) -> None:
        """Replace the file as a whole, so that no reader ever sees half of one."""
        if time.monotonic() < self._next or not differs(proportions, self._written):
            return
        self._next = time.monotonic() + SELDOM
        text = json.dumps({"facts": self.facts, **to_data(proportions)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = NamedTemporaryFile("w", encoding="utf-8", dir=self.path.parent, delete=False)  # noqa: SIM115
            try:
                with handle:
                    handle.write(text)
                os.replace(handle.name, self.path)
            except OSError:  # a full disk says so when the file is closed
                os.unlink(handle.name)
                raise
        except OSError as error:
            log.warning("%s was not written: %s", self.path, error)
        self._written = proportions  # also after a failure: a folder that cannot be written is not tried every time


def to_data(proportions: Proportions) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "passes": [[*key, round(times, 4)] for key, times in sorted(proportions.passes.items())],
        "others": [[*key, round(times, 5)] for key, times in sorted(proportions.others.items())],
    }


def parse(data: Mapping[str, Any]) -> Proportions:
    """The reverse; refuses what no machine can have measured."""
    passes = {(int(sequences), int(rows)): float(times) for sequences, rows, times in data["passes"]}
    others = {(str(name), int(sequences)): float(times) for name, sequences, times in data["others"]}
    if not all(0 < times < math.inf for times in [*passes.values(), *others.values()]):
        raise ValueError("it holds costs that are none")
    if not all(sequences >= 1 and rows >= 1 for sequences, rows in [*passes, *((many, 1) for _, many in others)]):
        raise ValueError("it holds passes without rows")
    return Proportions(passes, others)


def differs(new: Proportions, old: Proportions) -> bool:
    """Has any figure come or moved much?"""
    before = {(str(name), size): times for (name, size), times in [*old.passes.items(), *old.others.items()]}
    after = {(str(name), size): times for (name, size), times in [*new.passes.items(), *new.others.items()]}
    return any(key not in before or abs(times - before[key]) > CHANGED * before[key] for key, times in after.items())
