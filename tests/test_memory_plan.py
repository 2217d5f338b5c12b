"""The memory plan of a tiny model counts what is really held, drafters included, and towers that may come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_gemma import random_assistant, random_gemma, save_assistant, save_gemma
from tiny_media import random_media_gemma, random_media_qwen, random_unified, save_media_gemma, save_media_qwen
from transformers import AutoTokenizer

import forerun
from forerun import loading
from forerun.cli.serve_screen import plan_table
from forerun.device import CPU_CACHE_SHARE, GPU_CACHE_SHARE, plan_machine
from forerun.draft.model import ModelDrafter
from forerun.engine.captures import working_memory
from forerun.errors import ForerunError
from forerun.media.loading import media_family, media_weights
from forerun.memory_plan import MemoryPlan, memory_plan, page_bytes
from forerun.weights.checkpoint import open_checkpoint


def test_a_draft_model_is_named_and_counted(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    loaded = forerun.load(str(folder), draft_model=str(folder), dtype="float32", max_context=128)
    plan = memory_plan(loaded)
    lookup, model = plan.drafters
    assert (lookup.name, lookup.weights, lookup.cache) == ("lookup", 0, 0)
    assert model.name == "model" and model.about == f"the draft model {folder}"
    drafter, pool = loaded.engine.drafters.by_name["model"], loaded.engine.pool
    assert isinstance(drafter, ModelDrafter)
    assert model.weights == plan.weights == loaded.engine.model.weight_bytes > 0
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in pool.layers)
    assert 0 <= held - plan.cache <= held / pool.count  # at most a spare page beside it
    assert plan.total == plan.weights + plan.cache + model.weights + model.cache
    assert plan.cache_tokens == pool.count * pool.page and plan.context == 128 and plan.left > 0


SEEING: dict[str, Callable[[Path], Path]] = {
    "gemma4": lambda folder: save_media_gemma(folder, random_media_gemma("E4B")),
    "gemma4_unified": lambda folder: save_media_gemma(folder, random_unified()),
    "published": lambda folder: save_media_gemma(folder, random_unified(), published=True),
    "qwen3_5": lambda folder: save_media_qwen(folder, random_media_qwen(False)),
}


def modules_in(value: Any, depth: int = 0) -> list[torch.nn.Module]:
    """All modules that an object holds."""
    if isinstance(value, torch.nn.Module):
        return [value]
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    items = value if isinstance(value, tuple) else list(held.values())
    return [module for item in items if depth < 4 for module in modules_in(item, depth + 1)]


@pytest.mark.parametrize("family", SEEING)
def test_towers_are_counted_before_they_are_read(family: str, tmp_path: Path) -> None:
    folder = SEEING[family](tmp_path)
    checkpoint, tokenizer = open_checkpoint(folder), AutoTokenizer.from_pretrained(folder)
    towers = media_family(checkpoint, tokenizer, CPU, torch.float32)
    assert towers is not None and not modules_in(towers)
    for kind in towers.kinds:
        towers.load(kind)
    loaded = sum(tensor.nbytes for module in modules_in(towers) for tensor in module.state_dict().values())
    assert media_weights(checkpoint, torch.float32) == loaded > 0
    assert media_weights(checkpoint, torch.bfloat16) == loaded // 2


def test_what_cannot_be_read_is_not_counted(tmp_path: Path) -> None:
    text = tiny_model(tmp_path / "text", "llama")
    assert media_weights(open_checkpoint(text), torch.float32) == 0
    whole, deaf = SEEING["gemma4"](tmp_path / "whole"), SEEING["gemma4"](tmp_path / "deaf")
    values = json.loads((deaf / "config.json").read_text())
    (deaf / "config.json").write_text(json.dumps({**values, "audio_config": None}))
    both, one = (media_weights(open_checkpoint(folder), torch.float32) for folder in (whole, deaf))
    assert 0 < one < both


def test_towers_have_their_room_in_the_plan_and_in_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SEEING["gemma4"](tmp_path)
    plan = memory_plan(forerun.load(str(folder), dtype="float32"))
    assert plan.towers == media_weights(open_checkpoint(folder), torch.float32)
    assert plan.total == plan.weights + plan.cache + plan.towers

    free = 32 << 20  # far less than what the cache would like to have
    monkeypatch.setattr(loading, "free_memory", lambda device: free)
    for towers, counted in ((0, 0), (8 << 20, 8 << 20), (31 << 20, free // 2)):
        monkeypatch.setattr(loading, "media_weights", lambda *_, towers=towers: towers)
        pool = forerun.load(str(folder), dtype="float32").engine.pool
        share, page = (free - counted) * CPU_CACHE_SHARE, page_bytes(pool)
        assert share - page < pool.count * page <= share, "they leave text at least half of its share"


def lines_of(plan: MemoryPlan) -> list[str]:
    columns = [list(column.cells) for column in plan_table(plan).columns]
    return ["|".join(str(cell) for cell in row) for row in zip(*columns, strict=True)]


def test_the_plan_says_how_many_tokens_fit() -> None:
    plan = MemoryPlan(100, [], 50, 6400, 3200, 0, 900)
    assert "cache|50 B|6,400 tokens, 2 full contexts of 3,200" in lines_of(plan)
    assert "cache|50 B|6,400 tokens, less than one context of 8,192" in lines_of(replace(plan, context=8192))


def test_towers_are_named_on_the_screen() -> None:
    plan = MemoryPlan(100, [], 50, 64, 32, 0, 900, towers=7 << 20)
    assert "towers|7.0 MiB|loaded when the first images, videos or audio come" in lines_of(plan)
    assert not any("towers" in str(cell) for cell in plan_table(replace(plan, towers=0)).columns[0].cells)


@pytest.mark.parametrize("clusters", [0, 30])
def test_an_assistant_is_counted(clusters: int, tmp_path: Path) -> None:
    random = random_gemma("31B")
    target = save_gemma(tmp_path / "target", random)
    assistant = save_assistant(tmp_path / "assistant", random_assistant(random, clusters=clusters))
    loaded = forerun.load(str(target), draft_model=str(assistant), dtype="float32")
    held = {one.name: one for one in memory_plan(loaded).drafters}["assistant"]
    stored = load_file(assistant / "model.safetensors")
    matrices = sum(tensor.numel() * 4 for tensor in stored.values() if tensor.dim() > 1)
    assert held.cache == 0 and 0 < matrices <= held.weights < 1.01 * matrices  # outputs are padded to tiles of 16


def held(folder: Path, **options: Any) -> int:
    """Bytes of all caches, those of drafters among them."""
    plan = memory_plan(forerun.load(str(folder), dtype="float32", max_context=128, **options))
    return plan.cache + sum(drafter.cache for drafter in plan.drafters)


def test_memory_for_the_cache_is_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes or as a share of what is free, for the caches of drafters too, and with no other cap."""
    folder = tiny_model(tmp_path / "model", "llama")
    monkeypatch.setattr(loading, "free_memory", lambda device: 64 << 20)
    usual = held(folder)
    page = page_bytes(forerun.load(str(folder), dtype="float32").engine.pool)
    assert page < usual < 4 << 20, "eight contexts, which are little"
    for wanted, taken in (("8M", 8 << 20), (8 << 20, 8 << 20), (0.5, 32 << 20), ("0.25", 16 << 20), (1.0, 64 << 20)):
        assert taken - page < held(folder, memory=wanted) <= taken
        assert taken - 2 * page < held(folder, memory=wanted, draft_model=folder) <= taken


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("", "0.5"), ("much", "0.5"), ("-1", "0.5"), ("1.5", "0.5"), ("6X", "0.5"), (0, "0.5"), (True, "0.5"),
        (float("nan"), "0.5"), ("0", "0.5"), ("0M", "0.5"),
        ("900T", "free; give it less memory"), ("4K", "too little for the key/value cache"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_is_one_line(tmp_path: Path, wanted: Any, told: str) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    with pytest.raises(ForerunError, match=told.replace(".", r"\.")) as refused:
        forerun.load(str(folder), dtype="float32", memory=wanted)
    assert "\n" not in str(refused.value)


def test_a_gpu_gives_all_but_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is free after the weights, and after what towers and passes will want; no number of contexts is a cap."""
    model = forerun.load(str(tiny_model(tmp_path / "model", "llama")), dtype="float32", max_context=128).engine.model
    machine = replace(plan_machine("cpu", "float32", "none"), device=torch.device("cuda"))
    asked: list[torch.device] = []
    monkeypatch.setattr(loading, "free_memory", lambda device: asked.append(device) or 96 << 20)
    for towers, passes, wanted, expected in (
        (0, 0, None, 96 * GPU_CACHE_SHARE),
        (16, 0, None, 80 * GPU_CACHE_SHARE),
        (16, 20, None, 60 * GPU_CACHE_SHARE),
        (16, 90, None, 48 * GPU_CACHE_SHARE),  # at least half of what is free counts
        (16, 20, 0.5, 30),
        (16, 20, 7 << 20, 7),
    ):
        monkeypatch.setattr(loading, "working_memory", lambda *_, passes=passes: passes << 20)
        pool = loading.make_pool(model, 128, machine, towers << 20, wanted, {})
        assert 0 <= expected * (1 << 20) - pool.count * page_bytes(pool) < page_bytes(pool)
    assert {device.type for device in asked} == {"cuda"}


def test_passes_of_a_large_vocabulary_want_more(tmp_path: Path) -> None:
    small = forerun.load(str(tiny_model(tmp_path / "model", "llama")), dtype="float32").engine.model
    least = 64 * 16 * small.config.vocab * 4 + 2048 * small.config.hidden * 4
    assert least < working_memory(small, 2048) < working_memory(small, 4096)


def test_all_weights_are_there_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what they leave: a draft model that came later would find nothing."""
    folder, order = tiny_model(tmp_path / "model", "llama"), list[str]()
    for name in ("build", "load_head", "make_pool"):
        usual = getattr(loading, name)

        def noted(*given: Any, name: str = name, usual: Callable[..., Any] = usual, **more: Any) -> Any:
            order.append(name)
            return usual(*given, **more)

        monkeypatch.setattr(loading, name, noted)
    forerun.load(str(folder), dtype="float32", draft_model=str(folder))
    assert order == ["build", "build", "load_head", "make_pool"]
