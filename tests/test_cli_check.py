"""`forerun check` in front of a fake report: the tables, the verdict, the JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

import forerun
from forerun.cli.main import main


@dataclass
class FakeReport:
    family: str = "llama"
    parameters: int = 134_515_008
    layers: int = 30
    hidden: int = 576
    vocab: int = 49_152
    context: int = 8192
    dtype: str = "float32, int8 weights"
    weights_bytes: int = 163 * 2**20
    page_bytes: int = 1536
    cache_tokens: int = 8192
    cache_bytes: int = 3 * 2**30
    drafters: list[str] = field(default_factory=lambda: ["lookup", "model"])
    probe: list[tuple[int, bool]] = field(default_factory=lambda: [(1, True), (5, True)])
    guaranteed: bool = True
    exactness_cost: float | None = 1.314
    notes: list[str] = field(default_factory=lambda: ["a note [with] brackets " + "and length " * 30])


def run(line: str) -> int:
    return main(line.split())


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> FakeReport:
    fake = FakeReport()
    asked: dict[str, Any] = {}

    def inspect_model(model: str, **wishes: Any) -> FakeReport:
        asked.update(wishes, model=model)
        progress = wishes["progress"]
        with progress.task("probing", None) as task:
            task.advance()
        return fake

    monkeypatch.setattr(forerun, "inspect_model", inspect_model, raising=False)
    monkeypatch.setattr(fake, "asked", asked, raising=False)
    return fake


def test_the_report_names_everything_found(report: FakeReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "smollm2"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "llama", "135M (134,515,008)", "30 × 576", "49,152", "8,192 tokens", "float32, int8 weights", "lookup, model",
        "163.0 MiB", "3.0 GiB for 8,192 tokens", "1.5 KiB", "3.2 GiB", "products take 1.31 × the fastest",
        "same text as plain decoding: guaranteed", report.notes[0].strip(),
    ):  # fmt: skip
        assert words in out, words
    assert "\x1b" not in out and "│" not in out and err == "", "no colours, lines or bars into a pipe"


def test_a_broken_width_is_said_loudly_and_exits_0(report: FakeReport, capsys: pytest.CaptureFixture[str]) -> None:
    report.probe, report.guaranteed, report.exactness_cost = [(1, True), (3, False), (5, False)], False, None
    assert main(["check", "smollm2"]) == 0
    out = capsys.readouterr().out
    assert "NOT GUARANTEED (bits differ at width 3, 5)" in out
    assert out.count("DIFFERENT") == 2
    assert "price of exactness" not in out


def test_json_holds_the_same_facts(report: FakeReport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "smollm2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 134_515_008 and found["guaranteed"] is True
    assert found["memory"]["cache_bytes"] == 3 * 2**30
    assert found["probe"] == [{"width": 1, "same": True}, {"width": 5, "same": True}]


def test_wishes_reach_the_library(report: FakeReport) -> None:
    assert run("check folder --device cpu --dtype float32 --quantize none --max-context 64 --memory 6G --quiet") == 0
    asked = report.asked  # type: ignore[attr-defined]
    del asked["progress"]
    assert asked == {
        "model": "folder", "device": "cpu", "dtype": "float32", "quantize": "none", "max_context": 64,
        "memory": "6G",
    }  # fmt: skip
