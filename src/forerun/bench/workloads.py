"""The prompts of `forerun bench`: ten kinds of work, written for it, as lines of JSON under `data/workloads`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from forerun.errors import ForerunError

# Tokens of an answer, at most: long enough to show how a kind of work goes, short enough for ten of them.
ANSWER_TOKENS = {
    "questions": 64,
    "writing": 96,
    "code": 96,
    "edit": 128,
    "repeat": 96,
    "quote": 96,
    "translation": 64,
    "extraction": 80,
    "chat": 80,
    "arithmetic": 80,
}


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """One request: a text, or the messages of a conversation."""

    id: str
    content: str | list[dict[str, str]]

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a server takes it."""
        return [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work."""

    name: str
    answer_tokens: int
    prompts: tuple[WorkloadPrompt, ...]

    def sample(self, count: int) -> Workload:
        """The same with `count` of its prompts, spread over all of them."""
        total = len(self.prompts)
        if count >= total:
            return self
        return replace(self, prompts=tuple(self.prompts[n * total // count] for n in range(count)))


def load_workloads(names: Sequence[str] = ()) -> list[Workload]:
    """The named ones, or all of them, in the order of the table above."""
    for name in names:
        if name not in ANSWER_TOKENS:
            raise ForerunError(f"there is no workload {name!r}: choose from {', '.join(ANSWER_TOKENS)}")
    return [_read(name) for name in ANSWER_TOKENS if not names or name in names]


def _read(name: str) -> Workload:
    text = files("forerun").joinpath(f"data/workloads/{name}.jsonl").read_text(encoding="utf-8")
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    return Workload(name, ANSWER_TOKENS[name], tuple(WorkloadPrompt(line["id"], line["prompt"]) for line in lines))
