"""What the bits of keys and values depend on: a file that keeps some belongs to exactly this."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from forerun.cache.pages import PagePool
from forerun.cache.prefix_file import PrefixFacts
from forerun.device import Machine
from forerun.policy.cost_file import machine_facts

# Their versions may change bits: of text, or of the rows that pictures and sound become.
LIBRARIES = ("torch", "triton", "numba", "llvmlite", "numpy", "transformers", "torchvision", "pillow", "av")
PACKAGES = ("kernels", "models", "cache", "weights", "media", "draft")  # of forerun, whose code may change them


def prefix_facts(machine: Machine, pool: PagePool, model: str, drafters: Mapping[str, str]) -> PrefixFacts:
    """`model`: a digest of its files; `drafters`: by name of those that keep entries, of what is theirs."""
    here = machine_facts(machine.device, machine.describe())
    chosen = {"model": model, "device": machine.device.type, "precision": here["precision"]}
    versions = {
        "version of forerun": f"{here['forerun']} {_code()}",
        "version of a library": " ".join(f"{name} {_version(name)}" for name in LIBRARIES),
        "processor or GPU": here["device"],
        "number of threads": here["threads"],
        "layout of pages": _layout(pool),
    }
    return PrefixFacts(chosen | {"set of drafters": repr(sorted(drafters.items()))}, versions)


def _code() -> str:
    """A digest of the modules that compute."""
    root, total = Path(__file__).parent, hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _layout(pool: PagePool) -> str:
    states = "" if pool.states is None else f"{type(pool.states).__name__} {pool.states.layout}"
    return f"{pool.page} {[group.layout for group in pool.groups]} {states}"
