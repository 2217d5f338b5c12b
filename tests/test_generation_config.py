"""generation_config.json gives defaults, and nothing that is not sane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_gguf, tiny_model

import forerun
from forerun.options import GenerationOptions
from forerun.weights.generation_config import generation_defaults, sampling_defaults


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95}),
        ({"temperature": 0.6, "min_p": 0.1, "eos_token_id": [1]}, {"temperature": 0.6, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5, "repetition_penalty": 1.1}, {"temperature": 0.0}),
        ({"temperature": float("nan"), "top_p": 7, "top_k": -1, "min_p": "a", "repetition_penalty": True}, {}),
        ({"temperature": float("inf"), "top_p": None, "top_k": 2.5}, {}),
        ({"temperature": 10**400, "top_k": -(10**400)}, {}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
    ],
)
def test_what_is_read(tmp_path: Path, written: dict[str, Any], found: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    got = generation_defaults(tmp_path)
    also = {"top_k": 20} if written.get("top_k") == 20 else {}
    also |= {"repetition_penalty": 1.1} if written.get("repetition_penalty") == 1.1 else {}
    assert got == found | also
    GenerationOptions.of(got).sampling()  # the sampler takes whatever was let through


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({"temp": 0.20000000298023224, "top_p": 0.8999999761581421, "top_k": 40}, {"temperature": 0.2, "top_p": 0.9}),
        ({"min_p": 0.05, "penalty_repeat": 1.1, "xtc_threshold": 0.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 0}, {}),
        ({"temp": "hot", "top_p": 1e300, "top_k": -1, "min_p": float("nan")}, {}),
    ],
)
def test_what_a_gguf_header_says(header: dict[str, Any], found: dict[str, Any]) -> None:
    got = sampling_defaults({"general.name": "x"} | {f"general.sampling.{key}": value for key, value in header.items()})
    assert got == found | ({"top_k": 40} if header.get("top_k") == 40 else {})


def test_a_gguf_file_brings_its_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    folder = tiny_model(tmp_path / "small", "llama", num_hidden_layers=1)
    file = tiny_gguf(tmp_path / "small.gguf", folder, general__sampling__temp=0.25, general__sampling__top_k=7)
    assert forerun.load(str(file), dtype="float32").generation_defaults == {"temperature": 0.25, "top_k": 7}


def test_no_file_no_defaults(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}


def test_a_loaded_model_knows_its_name_and_defaults(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "small", "llama", num_hidden_layers=1)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"do_sample": True, "temperature": 0.7}))
    model = forerun.load(str(folder), dtype="float32")
    assert model.name == "small" and model.generation_defaults["temperature"] == 0.7


@pytest.mark.parametrize("given", [".", "./", "../small", "sub/.."])
def test_a_folder_has_a_name_however_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """A server of "." offered a model without a name."""
    folder = tiny_model(tmp_path / "small", "llama", num_hidden_layers=1)
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder)
    assert forerun.load(given, dtype="float32").name == "small"
