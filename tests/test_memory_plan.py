"""The memory plan of a tiny model counts what is really held, drafters included."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_model

import forerun
from forerun.draft.model import ModelDrafter
from forerun.memory_plan import memory_plan


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
