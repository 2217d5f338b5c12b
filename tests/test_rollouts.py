"""Rollouts: tokens of plain decoding with drafts, new weights as if they had been loaded, and a trainer's loop."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import HeadShape, random_head, write_head
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import forerun
from forerun.language_model import LanguageModel

LOADING: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantize": "none"}
PROMPTS = [[40, 50, 60, 40, 50, 60, 40, 50], [70, 80, 90]]
EXAMPLE = Path(__file__).parent.parent / "examples/policy_gradient.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m") / "tiny", "llama", num_hidden_layers=2)


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return forerun.load(folder, **LOADING)


def changed(folder: Path, target: Path, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """The same model with other weights, and those."""
    torch.manual_seed(seed)
    tensors = {n: t + 0.05 * torch.randn(t.shape) for n, t in load_file(folder / "model.safetensors").items()}
    target.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target, tensors


def said(model: LanguageModel, **more: Any) -> list[tuple[list[int], list[float], str]]:
    options = {"n": 3, "max_tokens": 20, "temperature": 1.0, "seed": 5} | more
    return [(one.tokens, one.logprobs, one.finish_reason) for one in model.generate_tokens(PROMPTS, **options)]


def test_drafts_change_neither_tokens_nor_log_probabilities(model: LanguageModel) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "logit_bias": {2: 4.0}}
    plain = said(model, draft="off", n=8, **options)
    drafted = model.generate_tokens(PROMPTS, n=8, draft="lookup", draft_tokens=4, **options)
    assert [(one.tokens, one.logprobs, one.finish_reason) for one in drafted] == plain
    assert sum(one.response.drafted for one in drafted) > 0
    assert [one.prompt for one in drafted] == [PROMPTS[0]] * 8 + [PROMPTS[1]] * 8
    assert len({tuple(tokens) for tokens, _, _ in plain}) > 8, "choices have noise of their own"
    alone = forerun.generate(model, PROMPTS[0], **options)
    tokens = plain[0][0]
    assert alone.tokens == [token for token in tokens if token not in model.stop_ids]
    ended = [one for one in plain if one[2] == "stop"]
    assert ended and all(one[0][-1] in model.stop_ids for one in ended), "the end was chosen too"
    assert model.engine.pool.free == model.engine.pool.count


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["own output", "tied"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_updated_weights_are_as_if_loaded(tmp_path: Path, quantize: str, options: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "tiny", "qwen3", num_hidden_layers=2, **options)
    target, tensors = changed(folder, tmp_path / "other", 1)
    loading = LOADING | {"quantize": quantize}
    model, other = forerun.load(folder, **loading), forerun.load(target, **loading)
    before = said(model)
    assert before != said(other)
    model.update_weights(tensors)
    found = said(model, draft="lookup", draft_tokens=3)
    assert found == said(other, draft="off")
    for tensor in tensors.values():
        tensor.zero_()
    assert said(model) == found, "they were copied"
    model.update_weights(load_file(folder / "model.safetensors"))
    assert said(model) == before


def test_a_head_follows_the_new_weights(folder: Path, tmp_path: Path) -> None:
    """What it shares with its target; what it drafts is checked as ever."""
    shape = HeadShape(64, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    write_head(tmp_path / "head", folder, shape, random_head(shape))
    target, tensors = changed(folder, tmp_path / "other", 2)
    model = forerun.load(folder, head=tmp_path / "head", **LOADING)
    drafted: dict[str, Any] = {"draft": "mtp", "draft_tokens": 3}
    assert said(model, **drafted) == said(model, draft="off")
    model.update_weights(tensors)
    gc.collect()
    assert said(model, **drafted) == said(forerun.load(target, **LOADING), draft="off")
    rollouts = model.generate_tokens(PROMPTS, max_tokens=20, **drafted)
    assert sum(one.response.drafted for one in rollouts) > 0 and not any(one.response.warnings for one in rollouts)


def test_a_few_tensors_may_change(model: LanguageModel, folder: Path) -> None:
    before = said(model)
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = load_file(folder / "model.safetensors")[name]
    model.update_weights({name: tensor * 1.5})
    assert said(model) != before
    model.update_weights({name: tensor})
    assert said(model) == before


@pytest.mark.parametrize(
    ("tensors", "about"),
    [
        ({}, "nothing to update"),
        ({"model.layers.9.mlp.down_proj.weight": torch.zeros(64, 112)}, "no tensor model.layers.9"),
        ({"model.norm.weight": torch.zeros(63)}, r"must have the shape \(64,\)"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "must be a tensor of float32"),
        ({"model.norm.weight": [0.0] * 64}, "must be a tensor of float32"),
        ({"mtp.fc.weight": torch.zeros(1)}, "MTP head"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_updated_changes_nothing(model: LanguageModel, tensors: dict[str, Any], about: str) -> None:
    before = said(model)
    good = {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 112)} if tensors else {}
    with pytest.raises(forerun.ForerunError, match=about):
        model.update_weights(good | tensors)
    assert said(model) == before


def test_weights_do_not_change_under_an_answer(model: LanguageModel) -> None:
    with forerun.stream(model, PROMPTS[0], max_tokens=30) as answer:
        next(answer)
        with pytest.raises(forerun.ForerunError, match="under way"):
            model.update_weights({"model.norm.weight": torch.ones(64)})
    model.update_weights({"model.norm.weight": torch.ones(64)})


@pytest.mark.parametrize(
    ("given", "about"),
    [
        ({"ids": []}, "empty"),
        ({"ids": ["a"]}, "list of token ids"),
        ({"ids": [5], "n": 0}, "n must be"),
        ({"ids": [5], "stop": "x"}, "stop is about text"),
        ({"ids": [5], "system": "x"}, "system is about text"),
        ({"ids": [5], "nonsense": 1}, "no option 'nonsense'"),
        ({"ids": [5] * 600}, "600"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wishes_that_cannot_be(model: LanguageModel, given: dict[str, Any], about: str) -> None:
    with pytest.raises(forerun.ForerunError, match=about):
        model.generate_tokens(**given)
    assert model.engine.pool.free == model.engine.pool.count


def test_a_policy_learns_from_speculative_rollouts(folder: Path) -> None:
    history = runpy.run_path(str(EXAMPLE))["train"](str(folder))
    rewards, differences, accepted = zip(*history, strict=True)
    assert sum(rewards[-3:]) / 3 > 5 * sum(rewards[:2]) / 2 + 0.2, rewards
    assert max(differences) < 1e-3, "the trainer and the engine are one policy"
    assert sum(accepted) > 0, "drafts were accepted"
