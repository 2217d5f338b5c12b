"""The prefix cache of a loaded model, as `forerun.generate`, `forerun chat` and trainers meet it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny import tiny_model

import forerun
from forerun.cli.main import main
from forerun.loading import PAGE

LOADING: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantize": "none"}
TEXT = "the cat and the dog and the rain in the north and the sun in the south of the land, " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m") / "tiny", "llama", num_hidden_layers=1)


def test_a_model_keeps_texts_between_calls(folder: Path) -> None:
    model, without = forerun.load(folder, **LOADING), forerun.load(folder, prefix_cache=False, **LOADING)
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 1, "draft": "lookup"}
    turns: list[dict[str, str]] = []
    cached = []
    for number in range(4):
        turns.append({"role": "user", "content": TEXT if number == 0 else f"and {number}?"})
        found, plain = (forerun.generate(one, turns, **options) for one in (model, without))
        assert found.tokens == plain.tokens and plain.cached_tokens == 0
        assert found.cached_tokens % PAGE == 0 and found.to_dict()["cached_tokens"] == found.cached_tokens
        cached.append(found.prompt_tokens - found.cached_tokens)
        turns.append({"role": "assistant", "content": found.text})
    assert cached[0] > 2 * PAGE and all(read <= PAGE + 60 for read in cached[1:])
    assert model.engine.pool.free == model.engine.pool.count
    proved = forerun.generate(model, turns[:1], prove=True, **options)
    assert proved.proof is not None and proved.proof.identical and proved.cached_tokens > 0


def test_answers_to_one_prompt_read_it_once(folder: Path) -> None:
    model = forerun.load(folder, **LOADING)
    prompt = [5 + number % 200 for number in range(3 * PAGE + 1)]
    rollouts = model.generate_tokens(prompt, n=4, max_tokens=4, temperature=1.0, seed=1)
    assert [one.response.cached_tokens for one in rollouts] == [0, *[3 * PAGE] * 3]


def test_new_weights_know_nothing_of_old_texts(folder: Path) -> None:
    model, other = forerun.load(folder, **LOADING), forerun.load(folder, **LOADING)
    prompt = [5 + number % 200 for number in range(2 * PAGE + 9)]
    tensors = {name: 1.1 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    first = model.generate_tokens(prompt, max_tokens=8)[0]
    model.update_weights(tensors)
    other.update_weights(tensors)
    found, plain = model.generate_tokens(prompt, max_tokens=8)[0], other.generate_tokens(prompt, max_tokens=8)[0]
    assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs) and found.logprobs != first.logprobs
    assert found.response.cached_tokens == 0
    assert model.generate_tokens(prompt, max_tokens=8)[0].response.cached_tokens == 2 * PAGE


def test_the_command_line_says_what_was_found(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "-m", str(folder), "-p", TEXT, "-n", "3", "--json", "--draft", "off"]) == 0
    assert json.loads(capsys.readouterr().out)["cached_tokens"] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n/regen\n/stats\n/exit\n"))
    assert main(["chat", "-m", str(folder), "-n", "3", "--draft", "off", "--quiet"]) == 0
    captured = capsys.readouterr()
    found = re.search(r"([0-9]+) of ([0-9]+) prompt tokens from the cache", captured.out + captured.err)
    assert found and 0 < int(found[1]) < int(found[2])
