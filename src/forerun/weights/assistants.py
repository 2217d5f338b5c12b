"""Folders with an assistant: how to know one, and where one lies that came with a model."""

from __future__ import annotations

from pathlib import Path

from forerun.weights.described import described

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SUFFIX = "-assistant"  # of the model's name on the hub, and of its folder


def is_assistant(model: Path) -> bool:
    """Does its config.json say so?"""
    return (described(model, "config.json") or {}).get("model_type") in MODEL_TYPES


def assistant_beside(model: Path) -> Path | None:
    """The assistant of a model folder: inside it, next to it, or in the hub cache where the model is too.

    Of a GGUF file: the one beside it whose name goes on with `assistant` where the model's goes on otherwise.
    """
    folder = model.absolute()
    if folder.is_file():
        return _file_beside(folder)
    places = [folder / "assistant", folder.with_name(folder.name + SUFFIX)]
    if folder.parent.name == "snapshots":  # models--org--name/snapshots/commit
        repository = folder.parent.parent
        repository = repository.with_name(repository.name + SUFFIX)
        snapshots, newest = repository / "snapshots", repository / "refs" / "main"  # which names one of them
        places += [snapshots / newest.read_bytes()[:40].decode(errors="replace")] if newest.is_file() else []
        places += sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    return next((place for place in places if (place / "config.json").is_file()), None)


def _file_beside(model: Path) -> Path | None:
    """`gemma-4-E4B-it-assistant-Q8_0.gguf` belongs to `gemma-4-E4B-it-Q4_K_M.gguf`."""
    found: dict[str, Path] = {}
    for file in sorted(model.parent.glob("*.gguf")):
        name, mark, _ = file.name.lower().partition("assistant")
        if mark and file != model and (name := name.rstrip("-_.")) and model.name.lower().startswith(name):
            found.setdefault(name, file)
    return found[max(found, key=len)] if found else None
