"""On a CUDA device, through the reference bodies: the same promise, and the CPU's logits."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

import forerun
from forerun.conversion import convert
from forerun.engine.captures import Graphs
from forerun.language_model import LanguageModel

pytestmark = pytest.mark.gpu

ODD = {"hidden_size": 72, "intermediate_size": 88, "head_dim": 20}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tiny_model(tmp_path_factory.mktemp("m"), "qwen3", **ODD)
    return forerun.load(str(folder), device="cuda", dtype=request.param, draft_model=str(folder))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("arm", ["lookup", "model"])
def test_drafting_changes_no_token(model: LanguageModel, arm: str, temperature: float) -> None:
    assert model.probe.guaranteed
    options = {"max_tokens": 40, "temperature": temperature, "seed": 3, "logit_bias": {20: 6.0, 21: 6.0}}
    plain = forerun.generate(model, "hello there, hello", draft="off", **options)
    other = forerun.generate(model, "hello there, hello", draft=arm, **options)
    assert other.tokens == plain.tokens and other.accepted > 0


def test_alone_and_in_a_batch(model: LanguageModel) -> None:
    prompts = ["one", "a second prompt that is longer", "three words here", "and a fourth"]
    options = {"max_tokens": 24, "temperature": 0.7, "seed": 1, "draft": "lookup"}
    alone = [forerun.generate(model, prompt, **options).tokens for prompt in prompts]
    running = [forerun.stream(model, prompt, **options) for prompt in prompts]
    assert [[c.token for c in answer if c.token is not None] for answer in running] == alone


def test_logits_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from forerun.cache.pages import SequenceCache
    from forerun.engine.probe import step

    folder = tiny_model(tmp_path, "llama", **ODD)
    tokens = list(range(5, 45))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    engine = forerun.load(str(folder), device="cuda", dtype="float32").engine
    cache = SequenceCache(engine.pool)
    cache.grow(len(tokens))
    with torch.inference_mode():
        torch.testing.assert_close(step(engine.model, [cache], [tokens]).cpu(), expected, atol=1e-3, rtol=0)


def test_int8_is_refused_with_a_clear_line(tmp_path: Path) -> None:
    with pytest.raises(forerun.ForerunError, match="--quantize none"):
        forerun.load(str(tiny_model(tmp_path, "llama")), device="cuda", quantize="int8")


def test_a_folder_in_int8_is_read_as_the_numbers_it_holds(tmp_path: Path) -> None:
    convert(str(tiny_model(tmp_path / "m", "llama")), tmp_path / "small", quantize="int8")
    model = forerun.load(str(tmp_path / "small"), device="cuda")
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 2}
    plain = forerun.generate(model, "hello there, hello", draft="off", **options)
    assert len(plain.tokens) == 16
    assert forerun.generate(model, "hello there, hello", draft="lookup", **options).tokens == plain.tokens


def test_graphs_that_became_garbage_do_not_disturb_a_capture() -> None:
    graphs, numbers = Graphs(torch.device("cuda")), torch.zeros(4, device="cuda")
    rings: list[list[object]] = [[graphs.capture(lambda: numbers + 2)]]
    rings[0].append(rings[0])  # only a collection frees it

    def launch() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            rings.clear()
            [[] for _ in range(5000)]  # enough new objects for a collection, were there any
        return numbers + 1

    thresholds = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        replay = graphs.capture(launch)
    finally:
        gc.set_threshold(*thresholds)
    assert replay().tolist() == [1.0] * 4 and gc.isenabled()
