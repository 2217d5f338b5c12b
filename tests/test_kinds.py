"""Kinds of requests, told from the prompt alone."""

from __future__ import annotations

import time

import pytest

from forerun.bench.workloads import load_workloads
from forerun.policy.kinds import kind_of, repeated


def words(text: str) -> list[int]:
    """Tokens of a simple tokenizer: one per word."""
    known: dict[str, int] = {}
    return [known.setdefault(word, len(known)) for word in text.split()]


def kinds(name: str) -> list[str]:
    (workload,) = load_workloads([name])
    texts = [p.content if isinstance(p.content, str) else p.content[-1]["content"] for p in workload.prompts]
    return [kind_of(words(text), text) for text in texts]


@pytest.mark.parametrize(
    ("workload", "kind"),
    [("questions", "short"), ("writing", "short"), ("code", "code"), ("edit", "given code")],
)
def test_the_workloads_are_told_apart(workload: str, kind: str) -> None:
    found = kinds(workload)
    assert found.count(kind) >= 0.75 * len(found), found


def test_questions_on_documents() -> None:
    assert kinds("quote").count("question on a text") >= 10


def test_repeated_runs() -> None:
    assert repeated([]) == repeated([1, 2]) == repeated(list(range(50))) == 0
    assert repeated([1, 2, 3] * 20) > 0.9
    assert kind_of([1, 2, 3, 4] * 40, "a b c d " * 40) == "repetitive"


def test_a_huge_prompt_is_not_read_whole() -> None:
    text = "def f():\n" * 10 + "word " * 10_000
    assert kind_of(list(range(10_000)), text) == "given text"


def test_blank_lines_are_read_once() -> None:
    began = time.thread_time()
    assert kind_of(list(range(100)), "\n" * 4000) == "short"
    assert time.thread_time() - began < 0.1
