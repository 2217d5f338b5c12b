"""Prompts from files: the user's own, and those that heads are measured on."""

from __future__ import annotations

import json
import re
from importlib.resources import files as package_files
from pathlib import Path

from forerun.errors import ForerunError

KINDS = (".txt", ".jsonl", ".md")


def read_prompts(path: Path) -> list[str]:
    """All prompts of a file, or of every .txt, .md and .jsonl file below a folder.

    Text: prompts are separated by blank lines when there are any, else each line is one. JSON lines: the field
    "prompt", or the first user message of "messages".
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in KINDS)
        if not files:
            raise ForerunError(f"{path} holds no prompts: put .txt or .jsonl files there")
    elif path.is_file():
        files = [path]
    else:
        raise ForerunError(f"there is no file or folder {path} to read prompts from")
    found = [prompt for file in files for prompt in _read(file)]
    if not found:
        raise ForerunError(f'{path} holds no prompts: write one per line, or JSON lines with a field "prompt"')
    return found


def read_evaluation(path: Path | None) -> list[tuple[str, str]]:
    """(category, prompt) of the held-out prompts: the built-in ones, or JSON lines of the user's."""
    if path is None:
        text = package_files("forerun").joinpath("data/eval_prompts.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ForerunError(f"cannot read the evaluation prompts in {path}") from error
    try:
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = [(str(entry.get("category", "all")), str(entry["prompt"])) for entry in entries]
    except (ValueError, KeyError, AttributeError) as error:
        raise ForerunError(f'{path}: evaluation prompts are JSON lines with the fields "prompt", "category"') from error
    if not found:
        raise ForerunError(f"{path} holds no evaluation prompts")
    return found


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ForerunError(f"cannot read the prompts in {file}: it is not UTF-8 text") from error
    if file.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), start=1)
        return [_from_json(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    blocks = re.split(r"\n[ \t]*\n", text.strip())
    prompts = blocks if len(blocks) > 1 else text.splitlines()
    return [prompt.strip() for prompt in prompts if prompt.strip()]


def _from_json(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ForerunError(f"{where}: not valid JSON") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if prompt is None and isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        users = (message.get("content") for message in entry["messages"] if message.get("role") == "user")
        prompt = next(users, None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ForerunError(f'{where}: has no text in the field "prompt"')
    return prompt.strip()
