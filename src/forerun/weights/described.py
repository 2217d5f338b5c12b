"""What describes a model beside its weights: files of its folder, or what the header of its GGUF file says instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.weights.folder import read_json


def described(model: Path, name: str) -> dict[str, Any] | None:
    """The JSON object that the file `name` of a model holds, or would hold; None when there is none."""
    if not model.is_file():
        return read_json(model, name)
    from forerun.weights.gguf_config import descriptions

    return descriptions(model).get(name)


def config_place(model: Path) -> str:
    """Where its config is, for messages."""
    return str(model) if model.is_file() else str(model / "config.json")
