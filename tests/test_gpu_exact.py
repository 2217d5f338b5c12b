"""The promise on a GPU: not one token differs, and not one bit of a row, through the graphs that serve."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import runner_of
from prompts import PROMPTS
from row_bits import check_row_bits
from tiny_qwen import tiny_qwen

import forerun
from forerun.bench.random_model import SHAPES, RandomCheckpoint
from forerun.bench.workloads import load_workloads
from forerun.cache.pages import PagePool
from forerun.device import plan_machine
from forerun.language_model import LanguageModel
from forerun.models.families import build
from forerun.progress import NullProgress
from forerun.response import Response

pytestmark = pytest.mark.gpu

# A few layers of each kind: the shapes of all products, and the whole vocabulary.
FEW_LAYERS = {"Qwen3.5-4B": 4, "Qwen3.5-35B-A3B": 4, "Llama-8B": 2}
BATCHES, WIDTHS = (1, 2, 7, 16, 17, 32, 64), (1, 2, 5, 8, 16)


@torch.inference_mode()
@pytest.mark.parametrize("shape", list(FEW_LAYERS))
def test_rows_keep_their_bits_in_real_shapes(shape: str) -> None:
    """Every sequence at every width against the same rows one at a time; those between have another text and length."""
    machine = plan_machine("cuda", "bfloat16", "none")
    checkpoint = RandomCheckpoint(SHAPES[shape] | {"num_hidden_layers": FEW_LAYERS[shape]}, machine.device)
    model = build(checkpoint, machine.kernels, machine.device, machine.dtype, NullProgress())
    pool = PagePool.for_model(model.config, 200, 64, machine.dtype, machine.device, slots=65, on_device=True)
    model.rope.reserve(512)
    check_row_bits(model, pool, (57, 140), BATCHES, WIDTHS)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tiny_qwen(tmp_path_factory.mktemp("q"), sparse=request.param == "sparse")
    return forerun.load(str(folder), device="cuda")


def test_tiny_hybrids_give_the_same_tokens(hybrid: LanguageModel) -> None:
    """Noise that drowns the logits makes a random head guess right now and then."""
    assert hybrid.probe.guaranteed
    accepted = 0
    for number in range(24):
        for temperature in (0.0, 0.8, 8.0):
            prompt = [5 + (number * 31 + 7 * n) % 280 for n in range(3 + 5 * number)]
            options: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": number}
            plain = forerun.generate(hybrid, prompt, draft="off", **options)
            for arm in ("lookup", "mtp"):
                other = forerun.generate(hybrid, prompt, draft=arm, draft_tokens=1 + number % 6, **options)
                assert other.tokens == plain.tokens, f"{arm}, prompt {number}, temperature {temperature}"
                accepted += other.accepted
    assert accepted > 100
    wishes = [([9 + (n * 17 + m) % 250 for m in range(4 + n)], {"seed": n, "temperature": 0.8}) for n in range(32)]
    alone = [forerun.generate(hybrid, p, draft="off", max_tokens=60, **o).tokens for p, o in wishes]
    assert together(hybrid, [(p, {"draft": "mtp", "max_tokens": 60, **o}) for p, o in wishes]) == alone
    assert together(hybrid, [(p, {"draft": "off", "max_tokens": 60, **o}) for p, o in wishes]) == alone


def together(model: LanguageModel, wishes: list[tuple[Any, dict[str, Any]]]) -> list[list[int]]:
    """Tokens of answers that run as one batch."""
    running = [forerun.stream(model, prompt, **options) for prompt, options in wishes]
    return [last(answer).tokens for answer in running]


def last(answer: Any) -> Response:
    *_, chunk = answer
    response: Response = chunk.response
    return response


@pytest.fixture(scope="module")
def real() -> LanguageModel:
    return forerun.load("smollm2", device="cuda")


def many_prompts() -> list[Any]:
    lines = files("forerun").joinpath("data", "eval_prompts.jsonl").read_text().splitlines()
    prompts: list[Any] = [json.loads(line)["prompt"] for line in lines]
    prompts += PROMPTS
    prompts += [prompt.content for workload in load_workloads() for prompt in workload.prompts]
    return prompts


@pytest.mark.parametrize(("temperature", "shift"), [(0.0, 0), (0.8, 0), (0.8, 1000)])
def test_a_hundred_thousand_tokens(
    real: LanguageModel, temperature: float, shift: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafting on against off, and a batch of 32 against one at a time: a third of them greedy, two thirds sampled."""
    assert real.probe.guaranteed
    prompts = many_prompts()
    assert len(prompts) >= 200
    options = [{"max_tokens": 288, "temperature": temperature, "seed": n + shift} for n in range(len(prompts))]
    work = list(zip(prompts, options, strict=True))
    plain = [forerun.generate(real, prompt, draft="off", **settings).tokens for prompt, settings in work]
    drafted = [forerun.generate(real, prompt, draft="mtp", **settings) for prompt, settings in work]
    assert [answer.tokens for answer in drafted] == plain
    assert sum(answer.accepted for answer in drafted) > 1000
    for draft in ("off", "mtp"):
        for first in range(0, len(prompts), 32):
            wishes = [(prompt, {**settings, "draft": draft}) for prompt, settings in work[first : first + 32]]
            assert together(real, wishes) == plain[first : first + 32], f"a batch from prompt {first}, {draft}"
    compared = sum(map(len, plain))
    with capsys.disabled():
        print(f"\n{compared} tokens of {len(prompts)} prompts at {temperature}, each decoded four ways: none differs")
    assert compared >= 33_334


def test_the_other_ways_to_choose(real: LanguageModel) -> None:
    """Filters, penalties and biases are the device's own; the host runs no round."""
    ways: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 40, "min_p": 0.02},
        {"repetition_penalty": 1.15},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logit_bias": {504: 2.0, 28: -1.0}, "suppress": [198]},
    ]
    for number, way in enumerate(ways):
        options = {"max_tokens": 48, "temperature": 0.8, "seed": number, **way}
        plain = forerun.generate(real, PROMPTS[number], draft="off", **options)
        for arm in ("lookup", "mtp", "auto"):
            assert forerun.generate(real, PROMPTS[number], draft=arm, **options).tokens == plain.tokens
    shapes = list(runner_of(real.engine)._rounds)
    assert any(shape.filtered for shape in shapes) and any(shape.edited for shape in shapes)


def test_memory_that_does_not_suffice_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_qwen(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("forerun.loading.build", full)
    with pytest.raises(forerun.ForerunError, match="GiB free: free some"):
        forerun.load(str(folder), device="cuda")
