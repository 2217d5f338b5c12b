"""Windows on a device: pages are given back while lanes hold the sequence, and nobody reads them afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_engines import DEVICE, SLOW, SMALL, TOKENS, device_engine
from engines import VOCAB, request, run
from tiny import tiny_model

from forerun.cache.groups import HOLE
from forerun.cache.pages import SequenceCache
from forerun.kernels.gpu import attention

pytestmark = [pytest.mark.kernels, SLOW, pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)")]
WINDOWS = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_tokens_do_not_depend_on_pages_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # the interpreter is slow
        monkeypatch.setattr(attention, "PROGRAMS", 1)
        monkeypatch.setattr(attention, "LEAST_SPLITS", 2)
    folder = tiny_model(tmp_path, "qwen2", **(SMALL | WINDOWS))
    asked = [request([(7 * n + at) % VOCAB for at in range(38)], max_tokens=TOKENS) for n in range(2)]
    engine = device_engine(folder, None)
    seen: list[int] = []
    unseen = SequenceCache._leave_unseen

    def watched(cache: SequenceCache) -> None:
        unseen(cache)
        seen.append(cache.blocks[0].count(HOLE))

    monkeypatch.setattr(SequenceCache, "_leave_unseen", watched)
    found = [sequence.answer for sequence in run(engine, *asked)]
    assert len(engine.pool.groups) == 2
    assert min(seen) == 0 and max(seen) == 1, "the first page went in the middle of an answer"
    monkeypatch.setattr(SequenceCache, "_leave_unseen", lambda cache: None)
    assert [sequence.answer for sequence in run(device_engine(folder, None), *asked)] == found
