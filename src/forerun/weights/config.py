"""config.json: read as plain data, and refused by name where it asks for code or for number formats not read here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.weights.described import described
from forerun.weights.schemes import scheme_of

CODE_KEYS = ("auto_map", "model_file")


def read_config(model: Path) -> dict[str, Any]:
    """The config.json of a model folder, or what the header of a GGUF file says in its place, checked."""
    if not model.is_dir() and not model.is_file():
        raise ForerunError(f"{model} is not a folder")
    config = described(model, "config.json")
    if config is None:
        raise ForerunError(f"{model} has no config.json: not a model folder (Hugging Face layout expected)")
    check_config(config, str(model))
    return config


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuses what is not read here; `where` names the model in the message."""
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        _refuse_code(part, where)
    scheme_of(config, where)
    if not isinstance(config.get("model_type"), str):
        raise ForerunError(f"{where}: config.json has no 'model_type'")


def _refuse_code(config: dict[str, Any], where: str) -> None:
    for key in CODE_KEYS:
        if config.get(key):
            raise ForerunError(
                f"{where}: config.json asks for code from the model folder ({key!r}), which is never run; "
                "use a version of the model without it"
            )
