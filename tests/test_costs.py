"""Costs of rounds: gaps are filled, proportions outlive the process, a broken file harms nobody."""

from __future__ import annotations

import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.policy.cost_file import SELDOM, CostFile, machine_facts
from forerun.policy.costs import CostTable, Proportions, RoundShape


def plain_and_wide(costs: CostTable, rounds: int, scale: float = 0.010, wide: float = 1.4, step: float = 0.1) -> None:
    """Runs of plain rounds, and of rounds with three drafts that are made in `step` each."""
    for _ in range(rounds):
        for _ in range(2):
            costs.learn(RoundShape(1, 1), scale)
        for _ in range(4):
            costs.learn(RoundShape(1, 4, (("mtp", 3, 1),)), (wide + 3 * step) * scale, {"mtp": 3 * step * scale})


def measured() -> CostTable:
    costs = CostTable()
    plain_and_wide(costs, 30)
    return costs


def test_gaps_are_filled_by_straight_lines() -> None:
    costs = measured()
    assert costs.pass_seconds(1) == pytest.approx(0.010, rel=0.02)
    assert costs.pass_seconds(4) == pytest.approx(0.014, rel=0.03)
    assert 0.010 < costs.pass_seconds(2) < costs.pass_seconds(3) < 0.014 < costs.pass_seconds(5) < 0.018
    assert costs.step_times("mtp", 1) == pytest.approx(0.1, rel=0.05)
    assert costs.times(RoundShape(1, 4, (("mtp", 3, 1),))) == pytest.approx(1.7, rel=0.03)


def test_what_is_known_only_as_a_sum_is_told_apart_by_depths() -> None:
    """A device drafts within its round: rounds of several widths and depths tell passes, steps and following apart."""
    costs, dice = CostTable(), random.Random(1)
    for _ in range(400):
        rows, depth, follows, waited = dice.choice(
            [(1, 0, 0, 0), (1, 0, 1, 0), (2, 1, 1, 0), (4, 3, 1, 0), (4, 1, 1, 1)]
        )
        times = 1 + 0.05 * (rows - 1) + 0.15 * depth + 0.08 * follows + 0.3 * waited
        shape = RoundShape(1, rows, (("mtp", depth, 1),) if depth else (), frozenset(["mtp"] * follows), bool(waited))
        costs.learn(shape, 0.002 * times * dice.uniform(0.99, 1.01))
    whole = costs.times(RoundShape(1, 4, (("mtp", 3, 1),), frozenset(["mtp"])))
    assert whole == pytest.approx(1.15 + 0.45 + 0.08, rel=0.03)
    assert costs.follow_times("mtp", 1) == pytest.approx(0.08, abs=0.02)
    assert costs.step_times("mtp", 1) == pytest.approx(0.15, abs=0.05)


def test_batches_are_measured_apart() -> None:
    costs = measured()
    for _ in range(30):
        costs.learn(RoundShape(1, 1), 0.010)
        costs.learn(RoundShape(4, 4), 0.030)
        costs.learn(RoundShape(4, 4), 0.030)
    assert costs.pass_seconds(4, 4) == costs.pass_seconds(4, 3) == pytest.approx(0.030, rel=0.05)
    assert costs.pass_seconds(4, 1) == pytest.approx(0.014, rel=0.05)
    assert costs.pass_seconds(16, 16) > 0.014  # never measured: as other passes of so many rows


def test_one_slow_round_does_not_count_for_what_it_took() -> None:
    costs = measured()
    costs.learn(RoundShape(1, 1), 10.0)
    costs.learn(RoundShape(1, 1), 0.010)
    assert costs.pass_seconds(1) < 0.013
    costs.learn(RoundShape(1, 4, (("mtp", 3, 1),)), 10.0)
    costs.learn(RoundShape(1, 1), 0.010)
    assert costs.pass_seconds(1) < 0.013 and costs.pass_times(4) < 1.6


def test_nor_does_the_very_first() -> None:
    costs = CostTable()
    for seconds in (10.0, 0.010, 0.010, 0.010):
        costs.learn(RoundShape(1, 1), seconds)
    assert 0.009 <= costs.pass_seconds(1) < 0.015


@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (4, 1), (4, 4)])
def test_a_clock_that_stands_still_tells_nothing(rows: int, sequences: int) -> None:
    costs = CostTable(measured().proportions())
    costs.learn(RoundShape(sequences, rows), 0.0)
    assert not costs.known
    for _ in range(3):
        costs.learn(RoundShape(1, 1), 0.010)
    costs.learn(RoundShape(sequences, rows), 0.0)
    assert costs.pass_seconds(1) == pytest.approx(0.010)


def test_what_was_learned_holds_on_a_machine_of_another_speed() -> None:
    """Proportions are kept, seconds are not: today everything takes three times as long."""
    costs = CostTable(measured().proportions())
    assert not costs.known and costs.remembers
    costs.learn(RoundShape(1, 1), 0.030)
    assert costs.known
    assert costs.pass_seconds(4) == pytest.approx(0.042, rel=0.05)
    assert costs.step_times("mtp", 1) == pytest.approx(0.1, rel=0.05)


def test_what_is_measured_now_outweighs_what_was_kept() -> None:
    costs = CostTable(measured().proportions())
    plain_and_wide(costs, 12, wide=1.1)
    assert costs.pass_seconds(4) == pytest.approx(0.011, rel=0.05)


def test_an_arm_is_not_blamed_for_a_bad_hour() -> None:
    """Everything takes ten times as long for a while; wide passes are last run then, plain ones afterwards."""
    costs = measured()
    plain_and_wide(costs, 15, scale=0.1)
    assert costs.pass_seconds(1) == pytest.approx(0.1, rel=0.1)
    assert costs.pass_times(4) == pytest.approx(1.4, rel=0.1)
    for _ in range(60):
        costs.learn(RoundShape(1, 1), 0.010)
    assert costs.pass_seconds(1) == pytest.approx(0.010, rel=0.05)
    assert costs.pass_seconds(4) == pytest.approx(0.014, rel=0.15)
    assert costs.step_times("mtp", 1) == pytest.approx(0.1, rel=0.2)


def test_a_neighbour_that_comes_and_goes_blames_no_arm() -> None:
    """The machine turns slow in the middle of runs of one shape: the level moves, the multiples stay."""
    costs, dice = measured(), random.Random(2)
    for number in range(600):
        slow = (1.8 if number % 100 < 50 else 1.0) * dice.uniform(0.95, 1.05)
        wide = number % 70 > 6
        costs.learn(RoundShape(1, 4) if wide else RoundShape(1, 1), 0.010 * slow * (1.4 if wide else 1.0))
        assert 1.2 < costs.pass_times(4) < 1.65, number


def test_a_pass_that_has_become_dear_is_found_out() -> None:
    """A stolen core hurts wide passes more than narrow ones: neighbours of different shape tell."""
    costs = measured()
    plain_and_wide(costs, 12, wide=2.2)
    assert costs.pass_times(4) == pytest.approx(2.2, rel=0.1)


def test_any_round_tells_how_fast_the_machine_is() -> None:
    costs = measured()
    for _ in range(30):
        costs.learn(RoundShape(1, 4, (("mtp", 3, 1),)), 0.034, {"mtp": 0.006})
    assert costs.pass_seconds(1) == pytest.approx(0.020, rel=0.1)


def test_a_wide_pass_is_not_dared_at_once() -> None:
    costs = CostTable()
    assert costs.widest(1) == 3 and costs.widest(64) == 96
    costs.learn(RoundShape(1, 3), 0.010)
    assert costs.widest(1) == 5
    assert CostTable(Proportions({(1, 16): 2.0}, {})).widest(1) == 24


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
    file.write(Proportions({(1, 1): 1.0}, {("mtp step", 1): 0.1}))
    assert file.path.exists()
    file.path.unlink()
    file.write(Proportions({(1, 1): 1.0}, {("mtp step", 1): 0.2}))
    assert not file.path.exists()  # too soon


GOOD = {"facts": FACTS, "passes": [[1, 1, 1.0]], "others": []}


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
        json.dumps(GOOD | {"others": [["mtp step", 1, "NaN"]]}),
        json.dumps(GOOD | {"others": [1]}),
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
    costs.learn(RoundShape(1, 1), 0.001)
    for _ in range(100):
        costs.learn(RoundShape(1, 1), 0.001)
        costs.learn(RoundShape(1, 1, (("mtp", 3, 1),)), 0.0009)
    assert 0 < costs.step_times("mtp", 1) < 0.01
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


def test_a_steady_machine_is_known_from_busy_rounds() -> None:
    """Sequences come and go, and nearly every round reads a prompt: figures are those of the device all the same."""
    table, dice = CostTable(), random.Random(4)
    table.steady = True
    true = {"step": 0.09, "follow": 0.12, "wait": 0.5, "row": 0.004, "prompt": 0.0033}

    def seconds(shape: RoundShape) -> float:
        steps = sum(depth for _, depth, _ in shape.drafts)
        times = 1 + true["row"] * (shape.rows - 1) + true["step"] * steps + true["prompt"] * shape.prompt_rows
        times += true["follow"] * bool(shape.follows) + true["wait"] * shape.waited
        return 0.0007 * times * (1 + 0.02 * abs(dice.gauss(0, 1)))

    for _ in range(3):
        table.learn(RoundShape(1, 1), seconds(RoundShape(1, 1)))
    for _ in range(1500):
        many, depth = dice.randint(9, 16), dice.choice((0, 0, 1, 3))
        drafts, follows = ((("mtp", depth, many),) if depth else ()), frozenset({"mtp"} if depth else ())
        waited, prompts = dice.random() < 0.1, dice.choice((0, 64, 200))
        shape = RoundShape(many, many * (1 + depth), drafts, follows, waited, prompts)
        table.learn(shape, seconds(shape))
    assert table.prompt_times(64) == pytest.approx(64 * true["prompt"], rel=0.15)
    assert table.wait_times(16) == pytest.approx(true["wait"], rel=0.15)
    for depth in (0, 1, 3):
        drafts, follows = ((("mtp", depth, 16),) if depth else ()), frozenset({"mtp"} if depth else ())
        shape = RoundShape(16, 16 * (1 + depth), drafts, follows)
        assert table.times(shape) / table.second == pytest.approx(seconds(shape), rel=0.08)
