"""The options of a generation are declared once: library, command line and sampler take them from there."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tiny import tiny_model

import forerun
from forerun import GenerationOptions
from forerun.cli.generate import generate
from forerun.engine.request import ACCEPT_CHOICES, DRAFT_CHOICES
from forerun.errors import ForerunError
from forerun.options import AcceptChoice, DraftChoice
from forerun.sample.parameters import SamplingParams

NAMES = [entry.name for entry in fields(GenerationOptions)]


def test_every_option_is_a_flag_with_its_default() -> None:
    flags = inspect.signature(generate).parameters
    assert "options" not in flags
    for entry in fields(GenerationOptions):
        assert flags[entry.name].default == entry.default and entry.metadata["help"]


def test_everything_the_sampler_takes_is_an_option() -> None:
    assert {entry.name for entry in fields(SamplingParams) if entry.init} - {"choice"} <= set(NAMES)
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
    given |= {"presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {4: 1.0}, "suppress": [7]}
    sampling = GenerationOptions.of(given).sampling({4: -9.0, 5: -1.0})
    assert {name: getattr(sampling, name) for name in given} == given | {
        "logit_bias": {4: 1.0, 5: -1.0},  # the bias of one token wins over its language's
        "suppress": frozenset({7}),
    }
    assert GenerationOptions().sampling().greedy


def test_choices_are_those_of_the_engine() -> None:
    assert get_args(DraftChoice) == DRAFT_CHOICES and get_args(AcceptChoice) == ACCEPT_CHOICES


def test_a_name_that_is_no_option_is_refused_in_one_line(tmp_path: Path) -> None:
    model = forerun.load(str(tiny_model(tmp_path, "llama")))
    with pytest.raises(ForerunError, match=r"^there is no option 'top_q': choose from system, raw, .*accept, prove$"):
        forerun.generate(model, "hello", top_q=1)
    with pytest.raises(ForerunError, match="draft must be one of"):
        forerun.generate(model, "hello", draft="magic")
    assert not model.engine.scheduler.active


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert GenerationOptions(stop="END").stops == ("END",)
    assert GenerationOptions(stop=["a", "b"]).stops == ("a", "b") and GenerationOptions().stops == ()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("max_tokens", value, "a whole number") for value in ("5", 1.5, float("nan"), True, [3])),
        *(("draft_tokens", value, "a whole number") for value in ("3", 2.5, True)),
        *(("stop", value, "a text or several") for value in (3, [3], [None], b"e", {"a": 1})),
        *(("suppress", value, "several token ids") for value in (5, "5", b"5")),
        *(("logit_bias", value, "biases by token id") for value in (5, [(5, 1.0)], "5=1")),
        *(("system", value, "text") for value in (3, b"x", ["x"])),
        *(("lang_bias", value, "text") for value in (3, {"ja": -1})),
        *(("raw", value, "True or False") for value in ("yes", None, 1)),
    ],
)
def test_a_value_of_another_kind_is_one_line(name: str, value: Any, words: str) -> None:
    """They were tracebacks, ignored, or like max_tokens=nan an answer without end."""
    with pytest.raises(ForerunError, match=f"^{name} must be {words}, not "):
        GenerationOptions.of({name: value})
    with pytest.raises(ForerunError, match="a suppressed token id must be a whole number"):
        GenerationOptions(suppress=[[1]]).sampling()  # type: ignore[list-item]


def test_numpy_counts_as_numbers(tmp_path: Path) -> None:
    assert type(GenerationOptions(max_tokens=np.int64(3)).max_tokens) is int
    assert GenerationOptions(draft_tokens=np.int32(2)).draft_tokens == 2 and GenerationOptions().draft_tokens == "auto"
    model = forerun.load(str(tiny_model(tmp_path, "llama")))
    ids = [5, 6, 7]
    options: dict[str, Any] = {"max_tokens": np.int64(3), "suppress": np.array([1, 2])}
    found = forerun.generate(model, list(np.array(ids)), **options)
    assert found.tokens == forerun.generate(model, ids, max_tokens=3, suppress=[1, 2]).tokens
    for prompt in (b"hello", bytearray(b"hello"), [True], [1.0], [np.bool_(True)], [np.array([1, 2])]):
        with pytest.raises(ForerunError, match="the prompt must be text, a list of messages or a list of token ids"):
            forerun.generate(model, prompt)  # type: ignore[arg-type]
