"""Costs of rounds: gaps are filled, proportions outlive the process, a broken file harms nobody."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.policy.cost_file import SELDOM, CostFile, machine_facts
from forerun.policy.costs import CostTable, Proportions


def measured(plain: float = 0.010) -> CostTable:
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, plain)
    for _ in range(40):
        costs.learn("mtp", 3, 4, 0.4 * plain, 1.4 * plain)
    return costs


def test_gaps_are_filled_by_straight_lines() -> None:
    costs = measured()
    assert costs.pass_seconds(4) == pytest.approx(0.014, rel=0.03)
    assert costs.pass_seconds(2) == pytest.approx(0.010 + 0.004 / 3, rel=0.03)
    assert costs.pass_seconds(7) == pytest.approx(0.018, rel=0.03)


def test_batches_are_measured_apart() -> None:
    costs = measured()
    costs.learn(None, 0, 4, 0.0, 0.030, sequences=4)
    assert costs.pass_seconds(4, 4) == costs.pass_seconds(4, 3) > 0.02
    assert costs.pass_seconds(4, 1) == pytest.approx(0.014, rel=0.03)
    assert costs.pass_seconds(16, 16) > 0.014  # never measured: as other passes of so many rows


def test_one_slow_round_does_not_count_for_what_it_took() -> None:
    costs = measured()
    costs.learn(None, 0, 1, 0.0, 10.0)
    costs.learn(None, 0, 8, 0.0, 10.0)  # nor does the first of its kind
    assert costs.pass_seconds(1) < 0.018 and costs.pass_seconds(8) < 0.05


def test_nor_does_the_very_first() -> None:
    costs = CostTable()
    for seconds in (10.0, 0.010, 0.010, 0.010):
        costs.learn(None, 0, 1, 0.0, seconds)
    assert 0.010 <= costs.pass_seconds(1) < 0.015


@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (4, 1), (4, 4)])
def test_a_clock_that_stands_still_tells_nothing(rows: int, sequences: int) -> None:
    costs = CostTable(measured().proportions())
    costs.learn(None, 0, rows, 0.0, 0.0, sequences)
    assert not costs.known
    for _ in range(3):
        costs.learn(None, 0, 1, 0.0, 0.010)
    costs.learn(None, 0, rows, 0.0, 0.0, sequences)
    assert costs.pass_seconds(1) == pytest.approx(0.010)


def test_what_was_learned_holds_on_a_machine_of_another_speed() -> None:
    """Proportions are kept, seconds are not: today everything takes three times as long."""
    costs = CostTable(measured().proportions())
    assert not costs.known and not costs.plain_measured
    costs.learn(None, 0, 1, 0.0, 0.030)
    assert costs.plain_measured
    assert costs.pass_seconds(4) == pytest.approx(0.042, rel=0.03)
    assert costs.draft_seconds("mtp", 3) == pytest.approx(0.012, rel=0.05)


def test_what_is_measured_now_outweighs_what_was_kept() -> None:
    costs = CostTable(measured().proportions())
    costs.learn(None, 0, 1, 0.0, 0.010)
    for _ in range(40):
        costs.learn(None, 0, 4, 0.0, 0.011)
    assert costs.pass_seconds(4) == pytest.approx(0.011, rel=0.05)


def test_an_arm_is_not_blamed_for_a_bad_hour() -> None:
    """Everything takes ten times as long for a while; wide passes are last run then, plain ones afterwards."""
    costs = measured()
    for _ in range(60):
        costs.learn(None, 0, 1, 0.0, 0.100)
        costs.learn("mtp", 3, 4, 0.040, 0.140)
    assert costs.pass_seconds(4) == pytest.approx(0.140, rel=0.1)
    for _ in range(60):
        costs.learn(None, 0, 1, 0.0, 0.010)
    assert costs.pass_seconds(1) == pytest.approx(0.010, rel=0.05)
    assert costs.pass_seconds(4) == pytest.approx(0.014, rel=0.15)
    assert costs.draft_seconds("mtp", 3) == pytest.approx(0.004, rel=0.2)


def test_any_round_tells_how_fast_the_machine_is() -> None:
    costs = measured()
    for _ in range(30):
        costs.learn("mtp", 3, 4, 0.008, 0.028)
    assert costs.pass_seconds(1) == pytest.approx(0.020, rel=0.2)


FACTS = {"device": "cpu", "model": "abc"}


def test_the_file_brings_it_back(tmp_path: Path) -> None:
    CostFile(tmp_path / "costs", FACTS).write(measured().proportions())
    found = CostFile(tmp_path / "costs", FACTS).read()
    assert found is not None and found.passes[(1, 4)] == pytest.approx(1.4, rel=0.03)
    assert CostFile(tmp_path / "costs", FACTS | {"model": "other"}).read() is None
    assert [file.suffix for file in (tmp_path / "costs").iterdir()] == [".json"]  # nothing half-written stays


def test_it_is_written_only_when_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    file = CostFile(tmp_path, FACTS)
    file.write(Proportions({(1, 1): 1.0}, {}))
    file.path.unlink()
    clock[0] += SELDOM
    file.write(Proportions({(1, 1): 1.05}, {}))
    assert not file.path.exists()
    file.write(Proportions({(1, 1): 1.0, (1, 2): 1.2}, {}))
    assert file.path.exists()
    file.path.unlink()
    file.write(Proportions({(1, 1): 1.0, (1, 2): 1.9}, {}))
    assert not file.path.exists()  # too soon


GOOD = {"facts": FACTS, "passes": [[1, 1, 1.0]], "drafts": {}}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps(GOOD | {"facts": {}}),
        json.dumps(GOOD | {"passes": [[1, 1]]}),
        json.dumps(GOOD | {"passes": [[0, 1, 1.0]]}),
        json.dumps(GOOD | {"passes": [[1, 1, -1.0]]}),
        json.dumps(GOOD | {"drafts": {"mtp": "NaN"}}),
        json.dumps(GOOD | {"drafts": [1]}),
        json.dumps(GOOD | {"passes": [[float("inf"), 1, 1.0]]}),
        "[" * 100_000,
        "\x00" * 100,
        "1" * (2 << 20),
    ],
)
def test_a_broken_file_is_ignored_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CostFile(tmp_path, FACTS)
    file.path.write_text(content)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert file.read() is None
    assert "cannot be used" in caplog.text
    file.write(Proportions({(1, 1): 1.0}, {}))
    assert CostFile(tmp_path, FACTS).read() == Proportions({(1, 1): 1.0}, {})


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "costs").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "forerun"):
        CostFile(tmp_path / "costs", FACTS).write(Proportions({(1, 1): 1.0}, {}))
    assert "was not written" in caplog.text


def test_threads_and_precision_are_facts() -> None:
    facts = machine_facts(torch.device("cpu"), "int8")
    assert facts["threads"] == str(torch.get_num_threads()) and facts["precision"] == "int8"
    assert {"device", "torch", "forerun"} <= set(facts)


def test_drafts_that_seem_to_cost_nothing_are_kept_as_nearly_nothing(tmp_path: Path) -> None:
    """A device drafts within its round: what is left after the pass may be noise, and may be negative."""
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, 0.001)
    for _ in range(200):
        costs.learn_draft("mtp", 3, -0.0001)
    assert 0 < costs.draft_seconds("mtp", 3) < 0.0001
    CostFile(tmp_path, {"a": "b"}).write(costs.proportions())
    assert CostFile(tmp_path, {"a": "b"}).read() is not None


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tempfile.NamedTemporaryFile

    def full(*args: Any, **options: Any) -> Any:
        handle = usual(*args, **options)
        monkeypatch.setattr(handle, "write", lambda text: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        return handle

    monkeypatch.setattr("forerun.policy.cost_file.NamedTemporaryFile", full)
    with caplog.at_level(logging.WARNING, "forerun"):
        CostFile(tmp_path / "costs", FACTS).write(Proportions({(1, 1): 1.0}, {}))
    assert "No space left" in caplog.text and not list((tmp_path / "costs").iterdir())
