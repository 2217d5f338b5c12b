"""Prompts on a device: rows like any other, beside generated ones, cut anywhere, many prompts in a pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_engines import DEVICE, SLOW, Knowing, answers, device_engine, runner_of, tiny_folder, tiny_hybrid
from engines import NoText, finish, request

from forerun.engine.engine import Engine
from forerun.engine.plan import Turn
from forerun.engine.sequence import Status
from forerun.kernels.interface import CHUNK_ROWS

# Rows that belong to no sequence may overflow; the interpreter says so.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]
PASSES = list[list[Turn]]


def watched(engine: Engine) -> PASSES:
    """The turns of every pass from now on."""
    runner, passes = runner_of(engine), PASSES()
    launch = runner._launch
    runner._launch = lambda ticket, turns: passes.append(turns) or launch(ticket, turns)  # type: ignore[method-assign]
    return passes


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=SLOW)])
def test_prompts_join_all_the_time(kind: str, tmp_path: Path) -> None:
    """Short and long ones, some longer than a pass takes, while others generate with drafts."""
    long = 40 if kind == "llama" else 150  # over two borders of a recurrence
    folder = tiny_folder(tmp_path) if kind == "llama" else tiny_hybrid(tmp_path)
    lengths = [5, long, 1, 9, 17, 4]
    prompts = [[(7 * n + 3 * at + at * at) % 280 + 4 for at in range(length)] for n, length in enumerate(lengths)]
    asked = [{"max_tokens": 6, "temperature": 0.8, "seed": n} for n in range(len(prompts))]
    plain = device_engine(folder, None, chunk=64)
    alone = [answers(plain, request(prompt, **own))[0] for prompt, own in zip(prompts, asked, strict=True)]
    texts = [prompt + answer for prompt, answer in zip(prompts, alone, strict=True)]
    engine = device_engine(folder, None, chunk=24, drafter=Knowing(*texts))
    passes, running = watched(engine), []
    wishes = [
        request(prompt, draft="mtp" if n % 2 else "off", draft_tokens=n % 3 + 1 if n % 2 else None, **own)
        for n, (prompt, own) in enumerate(zip(prompts, asked, strict=True))
    ]
    for first in (0, 2, 4):
        running += [engine.submit(wish, NoText()) for wish in wishes[first : first + 2]]
        for _ in range(2):
            engine.step()
    finish(engine, running)
    assert [sequence.answer for sequence in running] == alone
    for sequence in running:
        engine.release(sequence)
    engine.pool.check([])
    kinds = [[turn.is_prompt for turn in turns] for turns in passes]
    assert any(any(own) and not all(own) for own in kinds), "prompts beside generated rows"
    assert any(sum(own) > 1 for own in kinds), "several prompts in a pass"
    pieces = [turn for turns in passes for turn in turns if turn.is_prompt and turn.sequence is running[1]]
    assert len(pieces) > 1 and [turn.begin for turn in pieces[1:]] == [turn.stop for turn in pieces[:-1]]
    if kind == "hybrid":
        assert all(turn.begin % CHUNK_ROWS == 0 for turn in pieces)


@torch.inference_mode()
def test_the_state_after_a_prompt_does_not_depend_on_what_is_beside_it(tmp_path: Path) -> None:
    """Recurrent state and keys and values, bit for bit; in passes of its own, and beside another prompt and answers."""
    engine = device_engine(tiny_hybrid(tmp_path), None, chunk=100)
    prompt, found = [(5 * n + n * n) % 280 + 4 for n in range(70)], []
    for crowd in (0, 2):
        others = [engine.submit(request([9 + n, 8, 7], max_tokens=20), NoText()) for n in range(crowd)]
        for _ in range(2 * crowd):
            engine.step()
        if crowd:
            others.append(engine.submit(request([77] * 40, max_tokens=20), NoText()))
        sequence = engine.submit(request(prompt, max_tokens=1), NoText())
        finish(engine, [sequence])
        cache, states = sequence.cache, engine.pool.states
        assert states is not None and cache.slot is not None
        parts = [part for layer in states.copy(cache.slot, DEVICE).layers for part in layer]
        for layer in engine.pool.layers:
            keys, values = layer.keys[cache.pages], layer.values[cache.pages]
            parts += [torch.cat(list(keys), dim=-1)[..., :70], torch.cat(list(values), dim=-2)[..., :70, :]]
        found.append([part.clone() for part in parts] + [torch.tensor(sequence.answer)])
        for one in (sequence, *others):
            engine.release(one)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_a_prompt_does_not_wait_for_the_end_of_another_answer(tmp_path: Path) -> None:
    engine = device_engine(tiny_folder(tmp_path), None)
    first = engine.submit(request([5, 6, 7], max_tokens=20, draft="off"), NoText())
    while first.counters.rounds < 2:
        engine.step()
    second = engine.submit(request([9, 8, 7], max_tokens=3, draft="off"), NoText())
    for _ in range(3):
        engine.step()
    assert second.answer and first.status is Status.RUNNING
    finish(engine, [first, second])


@torch.inference_mode()
def test_log_probabilities_of_a_prompt_in_pieces_beside_others(tmp_path: Path) -> None:
    """The features that they come from are read before another round is queued."""
    folder = tiny_folder(tmp_path)
    prompt = [(11 * n) % 280 + 4 for n in range(30)]
    wish = replace(request(prompt, max_tokens=2), prompt_logprobs=True)
    found = []
    for chunk, beside in ((64, 0), (13, 2)):
        engine = device_engine(folder, None, chunk=chunk)
        others = [engine.submit(request([9, 8, 7 + n], max_tokens=30), NoText()) for n in range(beside)]
        for _ in range(2 * beside):
            engine.step()
        sequence = engine.submit(wish, NoText())
        finish(engine, [sequence])
        assert sequence.error is None and all(other.status is Status.RUNNING for other in others)
        found.append((sequence.answer, sequence.prompt_logprobs))
    assert found[0] == found[1] and len(found[0][1]) == len(prompt) - 1
