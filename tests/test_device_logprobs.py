"""Log probabilities on a device: those of an answer are those of one pass over the whole text, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from device_engines import PROMPTS, SLOW, Knowing, device_engine, tiny_folder
from engines import NoText, finish

from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.sample.parameters import SamplingParams

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fewer_programs")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def run(folder: Path, *requests: Request) -> list[Sequence]:
    machine = device_engine(folder, None)
    sequences = [machine.submit(one, NoText()) for one in requests]
    finish(machine, sequences)
    assert [sequence.error for sequence in sequences] == [None] * len(sequences)
    for sequence in sequences:
        machine.release(sequence)
    machine.pool.check([])
    return sequences


def test_same_bits_alone_beside_rounds_of_others_and_with_drafts(folder: Path) -> None:
    prompt = tuple(PROMPTS[1])
    asked = Request(prompt, SamplingParams(), 4, draft="off", logprobs=2, prompt_logprobs=True)
    drafted = Request(prompt, SamplingParams(), 4, draft="lookup", draft_tokens=2, logprobs=2)
    silent = Request(tuple(PROMPTS[0]), SamplingParams(), 6, draft="off")
    (alone,) = run(folder, asked)
    crowd = run(folder, silent, asked, drafted)
    found = [[(one.token, one.logprob) for one in sequence.emissions] for sequence in (alone, crowd[1], crowd[2])]
    assert found[0] == found[1] == found[2] and all(logprob is not None for _, logprob in found[0])
    assert alone.prompt_logprobs == crowd[1].prompt_logprobs and len(alone.prompt_logprobs) == len(prompt) - 1
    assert [one.logprob for one in crowd[0].emissions] == [None] * 6


@pytest.mark.parametrize("chunk", [64, pytest.param(7, marks=SLOW)])
def test_an_answer_has_the_log_probabilities_of_one_pass_over_the_text(folder: Path, chunk: int) -> None:
    """Generated with drafts that are right and wrong or without, and read as a prompt in one piece or several."""
    prompt = PROMPTS[1]
    plain = Request(tuple(prompt), SamplingParams(temperature=0.9, seed=3), 7, draft="off", logprobs=2)
    (alone,) = run(folder, plain)
    text = prompt + alone.answer
    machine = device_engine(folder, None, drafter=Knowing([*text[:-3], 3]), chunk=chunk)
    drafted = replace(plain, draft="mtp", draft_tokens=3)
    whole = Request(tuple(text), SamplingParams(), 1, draft="off", logprobs=2, prompt_logprobs=True)
    sequences = [machine.submit(one, NoText()) for one in (drafted, plain, whole)]
    finish(machine, sequences)
    assert [sequence.error for sequence in sequences] == [None] * 3 and sequences[0].counters.accepted
    expected = sequences[2].prompt_logprobs[len(prompt) - 1 :]
    for sequence in (alone, *sequences[:2]):
        assert [one.logprob for one in sequence.emissions] == expected


def test_a_prompt_of_one_token_has_none(folder: Path) -> None:
    """There is no token before its first."""
    (one,) = run(folder, Request((7,), SamplingParams(), 2, draft="off", logprobs=1, prompt_logprobs=True))
    assert one.prompt_logprobs == [] and all(emission.logprob for emission in one.emissions)
