"""The folders of a run: where it writes, and what it keeps there to go on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from forerun.errors import ForerunError
from forerun.train.data import load_answers, save_answers
from forerun.train.generate import AnsweredPrompt
from forerun.weights.heads import WEIGHTS

ANSWERS, SOURCES, CHECKPOINT, RECIPE = "answers.safetensors", "sources.json", "checkpoint.pt", "recipe.json"


def make_folders(out: Path, work: Path) -> None:
    """Where nothing can be written, or something else would be overwritten, is found out before a head is trained."""
    for flag, folder in (("--out", out), ("--work", work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = [file.name for file in out.iterdir()]
            if held and not any(name.startswith(WEIGHTS) for name in held):
                raise ForerunError(f"--out {out} holds other files than a head's: name a new folder")
            TemporaryFile(dir=folder).close()  # an old folder may be somebody else's
        except OSError as error:
            raise ForerunError(f"{flag} {folder}: {error.strerror}; name another folder") from error


def check_recipe(work: Path, chosen: dict[str, Any]) -> None:
    """Refuses to go on with other settings or data than the run began with."""
    recipe = json.dumps(chosen, sort_keys=True, indent=1).encode()
    file = work / RECIPE
    begun = any(path.name != RECIPE for path in work.iterdir())  # a recipe alone protects nothing
    if begun and file.is_file() and file.read_bytes() != recipe:
        raise ForerunError(f"{work} holds a run with other settings or data: delete it, or give another --work folder")
    file.write_bytes(recipe)


def kept_answers(work: Path) -> tuple[list[AnsweredPrompt], dict[str, int]] | None:
    """Answers of an earlier part of the run and where their prompts came from; None when there are none."""
    if not (work / ANSWERS).is_file():
        return None
    with sound(work):
        return load_answers(work / ANSWERS), json.loads((work / SOURCES).read_text(encoding="utf-8"))


@contextmanager
def sound(work: Path) -> Iterator[None]:
    """What is kept may have been damaged, by a power cut for example: whatever its readers raise is one line."""
    try:
        yield
    except torch.OutOfMemoryError:  # which is not the folder's fault
        raise
    except Exception as error:
        raise ForerunError(f"{work} holds a run that is damaged: delete it, or give another --work folder") from error


def keep_answers(work: Path, answers: list[AnsweredPrompt], sources: dict[str, int]) -> None:
    """The answers come last: where they are, the sources are as well."""
    (work / SOURCES).write_text(json.dumps(sources), encoding="utf-8")
    save_answers(work / ANSWERS, answers)
