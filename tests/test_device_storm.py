"""The storm on a device, or in Triton's interpreter: rounds run ahead while requests come, go, fail and are edited."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from device_engines import DEVICE, SLOW, device_engine, tiny_folder, tiny_head
from storm import Storm, random_visit
from tiny_qwen import random_model, save_model

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]
ARMS, FAULTS = ["off", "lookup", "mtp", "auto"], ["open", "feed", "observe", "ready", "close", "propose", "sink"]


@pytest.mark.parametrize("count", [pytest.param(200 if DEVICE.type == "cuda" else 40, marks=SLOW), 6])
@pytest.mark.parametrize("kind", ["dense", pytest.param("hybrid", marks=SLOW)])
def test_every_answer_is_the_one_it_would_be_alone(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)  # answers without a maximum must grow
    if kind == "dense":
        folder = tiny_folder(tmp_path / "model")
        head = tiny_head(tmp_path / "head", folder)
    else:
        folder, head = save_model(tmp_path / "model", random_model(False)), None
    tokens = 8 if DEVICE.type == "cuda" else 4
    sizes = {"context": tokens + 20}
    engine = device_engine(folder, head, native=head is None, pages=6, **sizes)
    alone = device_engine(folder, None, rounds=False, **sizes)
    dice = random.Random(count)
    visits = [random_visit(dice, ARMS, FAULTS, tokens, arrives=number // 2) for number in range(count)]
    storm = Storm(engine, visits)
    if count > 6:
        storm.break_passes({20: RuntimeError("no pass"), 31: torch.OutOfMemoryError("no memory")})
    storm.run()
    storm.compare(alone)
    engine.pool.check([])
    pool = engine.drafters.by_name["mtp"].pool  # type: ignore[attr-defined]
    assert pool.free == pool.count
    assert not engine.executor.slots.occupants  # type: ignore[attr-defined]
    assert storm.seen["accepted"] or count == 6
