"""Assistants by name and by place: loaded once, found beside a model, refused with a reason; the target goes on."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest
from tiny_gemma import random_assistant, random_gemma, save_assistant, save_gemma

import forerun
from forerun.draft.assistant import AssistantDrafter
from forerun.errors import ForerunError
from forerun.weights.assistants import assistant_beside

PROMPT = "The old sailor looks"
PLAIN = {"raw": True, "max_tokens": 24, "seed": 1}


@pytest.fixture
def target(gemma_pair: Path, tmp_path: Path) -> Path:
    """The model alone."""
    return Path(shutil.copytree(gemma_pair / "target", tmp_path / "model"))


def test_an_assistant_by_name(gemma_pair: Path, target: Path) -> None:
    plain = forerun.generate(forerun.load(str(target)), PROMPT, draft="off", **PLAIN)
    for position in ("n-1", "n"):
        model = forerun.load(str(target), draft_model=str(gemma_pair / "assistant"), assistant_position=position)
        for draft in ("assistant", "mtp", "auto"):
            found = forerun.generate(model, PROMPT, draft=draft, **PLAIN)
            assert found.tokens == plain.tokens and found.guaranteed and not found.warnings
            if draft != "auto":
                assert found.draft == "assistant" and found.accepted > 8
    with pytest.raises(ForerunError, match="is an assistant: use --draft assistant"):
        forerun.generate(model, PROMPT, draft="model")


def test_an_assistant_is_freed_with_its_model(gemma_pair: Path, target: Path) -> None:
    model = forerun.load(str(target), draft_model=str(gemma_pair / "assistant"))
    assert forerun.generate(model, PROMPT, draft="assistant", **PLAIN).accepted > 8
    drafter = model.engine.drafters.by_name["assistant"]
    assert isinstance(drafter, AssistantDrafter)
    held = [weakref.ref(drafter.assistant.norm), weakref.ref(model.engine.model)]
    del model, drafter
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_without_an_assistant_the_error_says_what_to_do(target: Path) -> None:
    model = forerun.load(str(target))
    with pytest.raises(ForerunError, match="no assistant drafter is loaded: name one with --draft-model"):
        forerun.generate(model, PROMPT, draft="assistant")
    with pytest.raises(ForerunError, match="no mtp drafter is loaded"):
        forerun.generate(model, PROMPT, draft="mtp")


@pytest.mark.parametrize("place", ["model/assistant", "model-assistant"])
def test_an_assistant_beside_the_model(place: str, gemma_pair: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(gemma_pair / "assistant", tmp_path / place)
    model = forerun.load(str(target))
    assert set(model.engine.drafters.by_name) == {"lookup", "assistant"}
    assert forerun.generate(model, PROMPT, draft="assistant", **PLAIN).accepted > 8


def test_an_assistant_in_the_hub_cache(tmp_path: Path) -> None:
    model = tmp_path / "models--google--tiny-it" / "snapshots" / ("0" * 40)
    assistant = tmp_path / "models--google--tiny-it-assistant" / "snapshots" / ("1" * 40)
    for folder in (model, assistant):
        folder.mkdir(parents=True)
    assert assistant_beside(model) is None
    (assistant / "config.json").write_text("{}")
    assert assistant_beside(model) == assistant
    # Of several, the one that the hub called the newest when it was last asked; the others may be half downloaded.
    newest = assistant.with_name("2" * 40)
    newest.mkdir()
    (newest / "config.json").write_text("{}")
    refs = assistant.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("2" * 40)
    assert assistant_beside(model) == newest
    (newest / "config.json").unlink()
    assert assistant_beside(model) == assistant


def damage(folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    if how == "is truncated or damaged":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "holds no weights":
        weights.unlink()
    elif how == "is missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["post_projection.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif how == "does not fit the model":
        shutil.rmtree(folder)
        save_assistant(folder, random_assistant(random_gemma("31B")))
    elif how == "must be a whole number":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"backbone_hidden_size": "64"}))
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))


@pytest.mark.parametrize(
    "how",
    [
        "is truncated or damaged",
        "holds no weights",
        "is missing",
        "does not fit the model",
        "must be a whole number",
        "is no assistant",
    ],
)
def test_a_broken_assistant_is_a_line_and_the_target_goes_on(
    how: str, gemma_pair: Path, target: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(gemma_pair / "assistant", tmp_path / "model-assistant"))
    damage(folder, how)
    model = forerun.load(str(target))
    found = forerun.generate(model, PROMPT, draft="auto", **PLAIN)
    (warning,) = found.warnings
    assert how in warning and "\n" not in warning and len(found.tokens) == 24
    with pytest.raises(ForerunError, match=how):
        forerun.generate(model, PROMPT, draft="assistant")
    if how != "is no assistant":
        with pytest.raises(ForerunError, match=how):
            forerun.load(str(target), draft_model=str(folder))


def test_an_assistant_is_no_model(gemma_pair: Path) -> None:
    with pytest.raises(ForerunError, match=r"is an assistant: load the model .* name it with --draft-model"):
        forerun.load(str(gemma_pair / "assistant"))


def test_a_strange_position_is_refused(gemma_pair: Path, target: Path) -> None:
    with pytest.raises(ForerunError, match="must be n-1 or n, not 'here'"):
        forerun.load(str(target), draft_model=str(gemma_pair / "assistant"), assistant_position="here")


def test_a_target_of_another_family_is_named(gemma_pair: Path, tmp_path: Path) -> None:
    folder = save_gemma(tmp_path, random_gemma("12B"))
    with pytest.raises(ForerunError, match="it is for a hidden size of 64, not 48; it has 320 tokens, not 300"):
        forerun.load(str(folder), draft_model=str(gemma_pair / "assistant"))
