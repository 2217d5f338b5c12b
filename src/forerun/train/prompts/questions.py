"""The prompts that heads are measured on: two built-in collections, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path

from forerun.errors import ForerunError
from forerun.train.prompts.files import prompt_of, read_text
from forerun.train.prompts.prompt import TrainingPrompt

EVERYDAY, WIDE = "everyday", "wide"
BUILT_IN = {EVERYDAY: "data/eval_prompts.jsonl", WIDE: "data/eval_wide.jsonl"}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that nothing is trained on."""

    collection: str
    category: str
    prompt: TrainingPrompt
    long: bool  # whether it brings a text of some hundred tokens along


def read_evaluation(path: Path | None) -> list[Question]:
    """The built-in collections (84 everyday prompts; 120 wide ones, a third of them long), or JSON lines of a file."""
    if path is None:
        package = package_files("forerun")
        return [
            question
            for name, file in BUILT_IN.items()
            for question in _read(package.joinpath(file).read_text(encoding="utf-8"), name, file)
        ]
    found = _read(read_text(path), "given", str(path))
    if not found:
        raise ForerunError(f"{path} holds no evaluation prompts")
    return found


def _read(text: str, collection: str, where: str) -> list[Question]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            prompt = prompt_of(line, f"{where}, line {number}")
            entry = json.loads(line)
            category, long = str(entry.get("category", "other")), bool(entry.get("long"))
            found.append(Question(collection, category, prompt, long))
    return found
