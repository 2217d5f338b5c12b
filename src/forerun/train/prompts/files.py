"""Prompts from files of the user's: text, or JSON lines in the forms that instruction sets come in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.train.prompts.prompt import TrainingPrompt

KINDS = (".txt", ".jsonl", ".md")  # what is looked for below folders
JSON_LINES = (".jsonl", ".ndjson", ".json")
FORMS = '"prompt", "messages", "conversations", "instruction" (with "input"), "question" or "text"'
# Who speaks, in ShareGPT's words and others'.
SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip


def read_prompts(paths: Sequence[Path]) -> list[TrainingPrompt]:
    """All prompts of files, and of every .txt, .md and .jsonl file below folders.

    Text: prompts are separated by blank lines when there are any, else each line is one. JSON lines, and the list of a
    .json file: see `prompt_of`.
    """
    found: list[TrainingPrompt] = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in KINDS and file.is_file())
        elif path.is_file():
            files = [path]
        else:
            raise ForerunError(f"there is no file or folder {path} to read prompts from")
        here = [prompt for file in files for prompt in _read(file)]
        if not here:
            raise ForerunError(f'{path} holds no prompts: write one per line, or JSON lines with a field "prompt"')
        found += here
    return found


def _read(file: Path) -> list[TrainingPrompt]:
    text, kind = read_text(file), file.suffix.lower()
    if kind == ".json" and text.lstrip().startswith("["):
        entries = enumerate(_parsed(text, str(file)), start=1)
        return [_prompt(entry, f"{file}, entry {number}") for number, entry in entries]
    if kind in JSON_LINES:
        # Not splitlines: a text inside of JSON may hold characters that it takes for line ends.
        lines = enumerate(text.split("\n"), start=1)
        return [prompt_of(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    blocks = re.split(r"\n[ \t]*\n", text.strip())
    prompts = blocks if len(blocks) > 1 else text.splitlines()
    return [prompt.strip() for prompt in prompts if prompt.strip()]


def prompt_of(line: str, where: str) -> TrainingPrompt:
    """The prompt of one line of JSON, in any of the usual forms.

    {"prompt"}; {"messages": [{"role", "content"}]}; {"conversations": [{"from", "value"}]}; {"instruction", "input" or
    "context"}; {"question", "context"}; {"text"}. A conversation goes up to the last thing the user says.
    """
    return _prompt(_parsed(line, where), where)


def read_text(file: Path) -> str:
    """A file's text. Some programs, on Windows above all, write a mark before its first character."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForerunError(f"cannot read the prompts in {file}: it is not UTF-8 text") from error
    except OSError as error:
        raise ForerunError(f"cannot read the prompts in {file}: {error.strerror or error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForerunError(f"{where}: not valid JSON") from error


def _prompt(entry: Any, where: str) -> TrainingPrompt:
    if not isinstance(entry, dict):
        raise ForerunError(f"{where}: not an object with a field {FORMS}")
    for field in ("messages", "conversations", "conversation", "prompt"):
        if entry.get(field) is not None and (field != "prompt" or isinstance(entry[field], list)):
            return _conversation(entry[field], f"{where}: {field}")
    if entry.get("prompt") is not None:
        parts = [entry["prompt"]]
    elif entry.get("instruction") is not None:
        parts = [entry["instruction"], entry.get("input"), entry.get("context")]
    elif entry.get("question") is not None:
        parts = [entry.get("context"), entry["question"]]
    elif entry.get("text") is not None:
        parts = [entry["text"]]
    else:
        raise ForerunError(f"{where}: has no field {FORMS}")
    if not all(part is None or isinstance(part, str) for part in parts):
        raise ForerunError(f"{where}: the prompt is not text")
    text = "\n\n".join(part.strip() for part in parts if part and part.strip())
    if not text:
        raise ForerunError(f"{where}: the prompt is empty")
    _check_characters(text, where)
    return text


def _check_characters(text: str, where: str) -> None:
    """JSON can spell halves of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ForerunError(f"{where}: the prompt holds half of a character (an unpaired surrogate)") from error


def _conversation(turns: Any, where: str) -> TrainingPrompt:
    """Messages up to the user's last one; a user's only message is plain text."""
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise ForerunError(f"{where} must be a list of objects")
    messages: list[dict[str, str]] = []
    for turn in turns:
        speaker = turn.get("role", turn.get("from"))
        text = turn.get("content", turn.get("value"))
        if isinstance(text, list) and all(
            isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in text
        ):
            text = "".join(part["text"] for part in text)
        if not isinstance(speaker, str) or speaker.lower() not in SPEAKERS:
            raise ForerunError(f"{where}: no speaker {speaker!r} is known; use user, assistant or system")
        if not isinstance(text, str):
            raise ForerunError(f"{where}: a turn without text")
        _check_characters(text, where)
        messages.append({"role": SPEAKERS[speaker.lower()], "content": text.strip()})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"]:
        raise ForerunError(f"{where}: the user says nothing")
    return messages[0]["content"] if len(messages) == 1 else messages
