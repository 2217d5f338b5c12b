"""The storm on a device, or in Triton's interpreter: whole rounds, host drafts and the general way in turns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from device_engines import DEVICE, SLOW, device_engine, tiny_folder, tiny_head
from storm import Storm, random_visit
from test_storm import FAULTS, FAULTS_CONTAINED

from forerun.kernels.gpu import attention

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)")]
ARMS = ["off", "lookup", "mtp", "auto"]


@pytest.mark.parametrize(("requests", "tokens"), [(6, 3), pytest.param(200, 8, marks=SLOW)])
def test_every_answer_is_the_one_it_would_be_alone(
    requests: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "splits", lambda layout: 2)  # the interpreter is slow
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 1)
    folder = tiny_folder(tmp_path / "model")
    head = tiny_head(tmp_path / "head", folder)
    dice = random.Random(5)
    visits = [random_visit(dice, ARMS, FAULTS, tokens, arrives=number) for number in range(requests)]
    storm = Storm(device_engine(folder, head, pages=6, context=tokens + 20), visits)
    if FAULTS_CONTAINED:
        storm.break_passes({requests // 2: RuntimeError("no pass")})
    storm.run()
    storm.compare(device_engine(folder, None, context=tokens + 20))
    pool = storm.engine.drafters["mtp"].pool  # type: ignore[attr-defined]
    assert pool.free == pool.count
