"""Log probabilities on a device: who asks for them runs beside the rounds of the others, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_engines import PROMPTS, device_engine, tiny_folder
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
