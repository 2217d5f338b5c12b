"""A second Ctrl-C, which nothing holds back, between any two lines of what counts pages and decides who runs."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from engines import VOCAB, NoText, decoder, engine, request, run
from tiny import tiny_model

from forerun.cache.groups import HOLE
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder

PLACES = ("forerun/cache/pages.py", "forerun/cache/groups.py", "forerun/engine/scheduler.py")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Pages are given back on the way."""
    folder = tiny_model(tmp_path_factory.mktemp("m"), "mistral", num_hidden_layers=1, sliding_window=16)
    return decoder(folder, quantize=False)


def step_with_cut(machine: Engine, after: int) -> bool:
    """One step that is interrupted after so many lines of these files. False: it had fewer."""
    left = after

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(PLACES) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        machine.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check_holders(machine: Engine, sequences: list[Sequence]) -> None:
    """Pages may be left to nobody for a while, but none has two holders, and none that is free has any."""
    for number, group in enumerate(machine.pool.groups):
        held = [page for s in sequences for page in s.cache.blocks[number] if page != HOLE]
        assert len(set(held)) == len(held) and not set(held) & set(group._free)
        assert len(set(group._free)) == len(group._free)


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(40))
def test_no_page_has_two_holders_and_no_token_is_wrong(
    windowed: Decoder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 2)  # they grow, and have to give way
    dice, machine = random.Random(seed), engine(windowed, pages=10, context=60)
    prompts = [[dice.randrange(4, VOCAB) for _ in range(dice.randint(1, 20))] for _ in range(4)]
    whole = [run(engine(windowed, context=60), request(p, max_tokens=24))[0].answer for p in prompts]
    sequences = [machine.submit(request(p, max_tokens=None, draft="lookup"), NoText()) for p in prompts]
    cuts = 0
    while any(s.status is not Status.FINISHED and len(s.answer) < 24 for s in sequences):
        if cuts < 3 and dice.random() < 0.4:
            cuts += step_with_cut(machine, dice.randint(1, 250))
            check_holders(machine, sequences)
        else:
            machine.step()
        for sequence in sequences:
            if len(sequence.answer) >= 24 and sequence.status is not Status.FINISHED:
                machine.cancel(sequence)
    assert cuts
    for sequence, expected in zip(sequences, whole, strict=True):
        count = min(24, len(sequence.answer))
        assert sequence.answer[:count] == expected[:count], sequence.error
        assert count == 24 or sequence.error is not None or sequence.finish_reason == "length"
        machine.release(sequence)
    machine.step()  # whatever an interruption left to nobody is counted when somebody comes in
    machine.pool.check([])
