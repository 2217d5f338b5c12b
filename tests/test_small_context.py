"""A context of a few tokens is a context: what a load needs for itself does not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model
from tiny_qwen import tiny_qwen

import forerun


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("context", [2, 3, 40])
def test_a_small_context_loads_and_answers(tmp_path: Path, kind: str, context: int) -> None:
    folder = tiny_model(tmp_path, "llama") if kind == "llama" else tiny_qwen(tmp_path)
    model = forerun.load(str(folder), device="cpu", max_context=context)
    assert model.probe.guaranteed
    assert len(forerun.generate(model, [5], max_tokens=50).tokens) < context
    with pytest.raises(forerun.ForerunError, match=f"the context holds {context}"):
        forerun.generate(model, [5] * (context + 1), max_tokens=1)
