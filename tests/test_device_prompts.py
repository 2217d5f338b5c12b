"""Prompts on a device: the first chunk is a captured pass, padded to one of a few lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import DEVICE, SLOW, device_engine, tiny_folder, tiny_head
from engines import NoText, finish, request
from tiny_qwen import tiny_qwen

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.pages import SequenceCache
from forerun.engine.engine import Engine
from forerun.engine.graphs import GraphedTarget
from forerun.engine.sequence import Status
from forerun.models.layers.rows import Output, Pass, make_pass

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]


@SLOW
@torch.inference_mode()
def test_a_padded_prompt_gives_what_it_gives_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "model")
    engine = device_engine(folder, tiny_head(tmp_path / "head", folder))
    graphed_target = target_of(engine)
    capture = graphed_target.graphs.capture

    def run_once(launch: Any) -> Any:
        launch()  # as a real capture does, with whatever the buffers hold
        return capture(launch)

    monkeypatch.setattr(graphed_target.graphs, "capture", run_once)
    engine.model.embedding[70] = float("nan")  # a token that spoils what it is near
    for length in (20, 5, 20, 8):
        found = []
        for target in (graphed_target, engine.model):
            cache = SequenceCache(engine.pool)
            cache.grow(length)
            prompt = [(9 if length < 20 else 60) + n for n in range(length)]
            output = target.forward(make_pass([(cache, prompt)], last_only=True, prefill=True, features=True))
            keys, values = (torch.cat(list(part[cache.pages]), dim=dim) for part, dim in pages_of(engine))
            assert output.features is not None
            parts = output.logits, output.features, keys[..., :length], values[..., :length, :]
            found.append([part.clone() for part in parts])
            cache.release()
        for padded, alone in zip(*found, strict=True):
            torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5, equal_nan=True)
        assert torch.isfinite(found[0][0]).all() == (length != 20)
    assert [count for count, _ in graphed_target.prompts.passes] == [32, 16]


@torch.inference_mode()
@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=SLOW)])
def test_recurrent_layers_see_nothing_of_the_padding(tmp_path: Path, sparse: bool) -> None:
    """Lengths on both sides of the convolution's window, one after another in one slot."""
    engine = device_engine(tiny_qwen(tmp_path, sparse=sparse), None, rounds=False)
    states = engine.pool.states
    graphed_target = target_of(engine)
    assert isinstance(states, DeviceStates)
    for length in (2, 20):
        found = []
        for target in (graphed_target, engine.model):
            cache = SequenceCache(engine.pool)
            cache.grow(length + 2)
            prompt = [length + n for n in range(length)]
            output = target.forward(make_pass([(cache, prompt)], last_only=True, prefill=True))
            parts = [output.logits.clone()]
            cache.commit(length)
            assert cache.slot is not None
            parts += [part for layer in states.copy(cache.slot, DEVICE).layers for part in (layer[0], layer[1][:3])]
            output = graphed_target.forward(make_pass([(cache, [7, 8])], last_only=False))
            found.append([*parts, output.logits.clone()])
            cache.commit(2)
            cache.release()
        for padded, alone in zip(*found, strict=True):
            torch.testing.assert_close(padded, alone, atol=5e-4, rtol=1e-3)
        assert found[0][2].any()
    assert [count for count, _ in graphed_target.prompts.passes] == [16, 32]


def target_of(engine: Engine) -> GraphedTarget:
    target = engine.executor.target
    assert isinstance(target, GraphedTarget)
    return target


def pages_of(engine: Engine) -> list[tuple[torch.Tensor, int]]:
    """Keys and values of the first layer, and which dimension is the page's."""
    return [(engine.pool.layers[0].keys, -1), (engine.pool.layers[0].values, -2)]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="what spoils memory here would become part of captured graphs")
@torch.inference_mode()
def test_a_round_of_the_host_leaves_the_features_of_a_prompt_alone(tmp_path: Path) -> None:
    """Graphs share their memory: what one gave is overwritten by another. Drafters see it after the host's round."""
    folder = tiny_folder(tmp_path / "model")
    engine = device_engine(folder, tiny_head(tmp_path / "head", folder))
    usual, last = engine.model.forward, []

    def forward(batch: Pass) -> Output:
        for tensor in last:
            tensor.fill_(float("nan"))
        output = usual(batch)
        last[:] = [tensor for tensor in (output.logits, output.features) if tensor is not None]
        return output

    engine.model.forward = forward  # type: ignore[method-assign]
    drafter: Any = engine.drafters.by_name["mtp"]
    feed, fed = drafter.feed, []

    def keep(sequence_id: int, features: torch.Tensor) -> None:
        fed.append(bool(features.isfinite().all()))
        feed(sequence_id, features)

    drafter.feed = keep
    by_host = engine.submit(replace(request([5, 6, 7], max_tokens=5), logprobs=0), NoText())
    while by_host.status is not Status.RUNNING:
        engine.step()
    drafted = engine.submit(request([9, 8, 7], max_tokens=3, draft="mtp", draft_tokens=1), NoText())
    finish(engine, [by_host, drafted])
    assert by_host.error is None and drafted.error is None and fed and all(fed)


def test_a_prompt_does_not_wait_for_the_end_of_another_answer(tmp_path: Path) -> None:
    """Rounds of the same sequences follow each other without the host; not while somebody has to be read."""
    folder = tiny_folder(tmp_path / "model")
    engine = device_engine(folder, tiny_head(tmp_path / "head", folder))
    first = engine.submit(request([5, 6, 7], max_tokens=20, draft="off"), NoText())
    while first.counters.rounds < 2:
        engine.step()
    second = engine.submit(request([9, 8, 7], max_tokens=3, draft="off"), NoText())
    for _ in range(3):
        engine.step()
    assert second.answer and first.status is Status.RUNNING
    finish(engine, [first, second])
