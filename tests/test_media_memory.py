"""Rows of media are in host memory, and only until the prompt has been read; a device sees those of one pass."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import VOCAB, NoText, decoder, engine, finish, request, run
from local_engines import language_model, serving, work
from tiny import tiny_model
from tiny_qwen import random_model, save_model

from forerun.draft.mtp import MtpDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import MediaRun, PromptMedia
from forerun.serve.engine_client import Ended

TOKENS = [(37 * n + 11) % VOCAB for n in range(50)]


class Rows:
    """Media of a prompt whose end can be seen."""

    def __init__(self, hidden: int, seed: int = 0) -> None:
        rows = torch.randn(20, hidden, generator=torch.Generator().manual_seed(seed))
        self.media: PromptMedia | None = PromptMedia([MediaRun(14, rows)])
        self._seen = weakref.ref(rows)

    def give(self, asked: Request) -> Request:
        """They belong to the request alone from now on."""
        media, self.media = self.media, None
        return replace(asked, media=media)

    @property
    def held(self) -> bool:
        gc.collect()
        return self._seen() is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


def asked(**options: object) -> Request:
    return request(TOKENS, **{"max_tokens": 12, **options})  # type: ignore[arg-type]


@torch.inference_mode()
def step_until(machine: Engine, sequence: Sequence, status: Status) -> None:
    for _ in range(50):
        if sequence.status is status:
            return
        machine.step()
    raise AssertionError(f"it never is {status}")


def expected(model: Decoder) -> list[int]:
    return run(engine(model), Rows(64).give(asked()))[0].answer


def test_rows_are_given_up_when_the_prompt_has_been_read(model: Decoder) -> None:
    machine, rows = engine(model), Rows(64)
    sequence = machine.submit(rows.give(asked()), NoText())
    step_until(machine, sequence, Status.PREFILL)
    assert sequence.cache.length < len(TOKENS) and rows.held
    step_until(machine, sequence, Status.RUNNING)
    assert not rows.held
    sequence.cache.park()  # nothing is computed again: pages are copied
    sequence.status = Status.PARKED
    finish(machine, [sequence])
    assert sequence.answer == expected(model)
    machine.resume(sequence, 4)
    finish(machine, [sequence])
    assert sequence.error is None and len(sequence.answer) == 16


@pytest.mark.parametrize("begun", [False, True])
def test_who_left_before_that_may_come_back(model: Decoder, begun: bool) -> None:
    machine, rows = engine(model), Rows(64)
    sequence = machine.submit(rows.give(asked()), NoText())
    if begun:
        step_until(machine, sequence, Status.PREFILL)
    machine.cancel(sequence)
    assert rows.held
    machine.resume(sequence)
    finish(machine, [sequence])
    assert sequence.answer == expected(model) and not rows.held


def test_choices_of_one_request_do_not_take_them_from_each_other(model: Decoder) -> None:
    rows = Rows(64)
    first = rows.give(asked())
    second = replace(first)
    answers = run(engine(model), first, second)
    assert [one.answer for one in answers] == [expected(model)] * 2


def test_a_head_keeps_none_either(tmp_path: Path) -> None:
    target = decoder(save_model(tmp_path, random_model(False)), quantize=False)
    head, rows = target.native_head(), Rows(48)
    assert head is not None
    machine = engine(target, beside=[MtpDrafter(head, VOCAB)])
    sequence = machine.submit(rows.give(asked(draft="mtp", draft_tokens=2)), NoText())
    step_until(machine, sequence, Status.RUNNING)
    assert not rows.held
    with torch.inference_mode():
        machine.step()
    assert sequence.counters.drafted and not sequence.warnings


def test_a_pass_brings_its_own_rows_to_the_device() -> None:
    media = PromptMedia([MediaRun(2, torch.zeros(6, 4), whole=True)], torch.arange(10).expand(3, -1))
    seen = media.between(0, 8, torch.device("meta"))
    assert seen.index is not None and seen.embeddings is not None
    assert seen.together is not None and seen.positions is not None
    assert {one.device.type for one in (seen.index, seen.embeddings, seen.together, seen.positions)} == {"meta"}
    assert media.runs[0].embeddings.device.type == "cpu"


def test_a_server_keeps_none_for_an_answer_under_way(model: Decoder) -> None:
    rows = Rows(64)

    async def main() -> None:
        async with serving(language_model(model)) as local:
            (answer,) = await local.start([work(rows.give(asked(max_tokens=400)))])
            async for item in answer:
                assert not isinstance(item, Ended)
                break
            assert not rows.held
            await answer.close()

    asyncio.run(main())
