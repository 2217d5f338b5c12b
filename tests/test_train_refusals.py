"""What `forerun train-head` refuses, in one line and before a head is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model

from forerun.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("Say one.\nSay two.")
    return tmp_path / "prompts.txt"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--minutes", "-1"], "--minutes"),
        (["--minutes", "inf"], "--minutes"),
        (["--seed", "-1"], "--seed -1: give a whole number from 0 to 4294967295"),
        (["--seed", "9999999999"], "--seed"),
        (["--draft-vocab", "some"], "--draft-vocab"),
        (["--taps", "1,x"], "--taps"),
        (["--device", "abacus"], "abacus"),
        (["--prompts", "nowhere.txt", "--steps", "1"], "nowhere.txt"),
        (["--taps", "1,99", "--steps", "1"], "layers 0 to 2"),
        (["--texts", "nowhere", "--steps", "1"], "nowhere holds no texts"),
        (["--texts", "nowhere", "--prompts", "nowhere.txt", "--steps", "1"], "--texts is for the built-in prompts"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], word: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-head", str(model), "--out", str(tmp_path / "head"), "--device", "cpu", *argv]) == 2
    error = capsys.readouterr().err
    assert word in error.splitlines()[-1]


def test_a_head_does_not_overwrite_a_model(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out with the model's own folder replaced its config.json and its README."""
    before = {file: file.read_bytes() for file in model.iterdir()}
    (tmp_path / "file").touch()
    command = ["train-head", str(model), "--device", "cpu", "--steps", "1", "--prompts", str(prompts), "--out"]
    for more, word in (
        ([str(model), "--work", str(tmp_path / "work")], "holds other files than a head's"),
        ([str(tmp_path / "file"), "--work", str(tmp_path / "work")], "name another folder"),
        ([str(tmp_path / "head"), "--work", str(tmp_path / "file")], "name another folder"),
    ):
        assert main(command + more) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert word in line
    assert {file: file.read_bytes() for file in model.iterdir()} == before


def test_a_model_that_is_not_there_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-head", "nothere", "--out", str(tmp_path / "head"), "--device", "cpu"]) == 2
    assert "model not found" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
