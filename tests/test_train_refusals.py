"""What `forerun train-head` refuses, in one line and before a head is trained."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.text.chat import encode_prompt
from forerun.train import work
from forerun.train.encode import PromptEncoder


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
        (["--device", "abacus"], "unknown device 'abacus': use auto, cpu or cuda"),
        (["--device", "mps"], "device 'mps' is not supported: use auto, cpu or cuda"),
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


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for %}", "the model's chat template cannot render"),
        ("{{ raise_exception('never') }}", "can be asked no evaluation prompt"),
        ({"rag": "x", "tool_use": "y"}, "several chat templates, but no default one"),
    ],
)
def test_a_template_that_fails_is_one_line(
    template: str | dict[str, str],
    word: str,
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    command = ["train-head", str(folder), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--prompts", str(prompts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_a_template_that_wants_a_system_message_takes_prompts_that_have_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + str(
        tokenizer.chat_template
    )
    talk = [{"role": role, "content": "Hi"} for role in ("system", "user")]
    encoder = PromptEncoder(tokenizer, 300)
    assert encoder.encode_all(["Hi", talk]) == [None, encode_prompt(tokenizer, talk)]
    assert encoder.user_turn() is None


def test_a_folder_is_where_its_name_says(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "." and "/" have no name that another folder's could be made of; `--out=~/head` is left to us by shells."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    prompts.rename(tmp_path / os.fsdecode(b"fr\xe4gen.txt"))  # from an old archive
    (tmp_path / "q.jsonl").write_text('{"prompt": "What is it?"}')
    command = ["train-head", str(model), "--device", "cpu", "--steps", "1", "--answer-tokens", "8", "--quiet"]
    command += ["--evaluation", "~/q.jsonl", "--prompts", os.fsdecode(b"~/fr\xe4gen.txt")]
    for out, made in ((".", tmp_path / "here"), ("~/head", tmp_path / "head")):
        assert main([*command, "--out", out]) == 0, capsys.readouterr().err
        assert (made / "head.safetensors").is_file() and (tmp_path / f"{made.name}.work").is_dir()
        assert "fr?gen.txt" in (made / "README.md").read_text()
    capsys.readouterr()
    assert main([*command, "--out", "/"]) == 2
    assert "holds other files than a head's" in capsys.readouterr().err
    assert not Path("/.work").exists()


def test_a_folder_that_cannot_be_written_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old --out folder of somebody else's ended the run when the head was trained and could not be saved."""

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(work, "TemporaryFile", refuse)
    with pytest.raises(ForerunError, match=r"--out .*: Permission denied; name another folder"):
        work.make_folders(tmp_path / "head", tmp_path / "work")


def test_a_damaged_run_is_one_line(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A power cut may leave files without their content."""
    (tmp_path / "q.jsonl").write_text('{"prompt": "What is it?"}')
    command = ["train-head", str(model), "--device", "cpu", "--steps", "1", "--answer-tokens", "8", "--quiet"]
    command += ["--evaluation", str(tmp_path / "q.jsonl"), "--prompts", str(prompts), "--out", str(tmp_path / "head")]
    assert main(command) == 0
    capsys.readouterr()
    kept = {file: file.read_bytes() for file in (tmp_path / "head.work").iterdir()}
    assert len(kept) == 4
    for file, content in kept.items():
        for damaged in (b"", b"\xff" * 40, content[: len(content) // 2]):
            file.write_bytes(damaged)
            assert main(command) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "head.work holds a run" in line and "delete it, or give another --work folder" in line
        file.write_bytes(content)
    assert main(command) == 0


def test_tokens_that_the_model_lacks_are_one_line(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer may have been added to, and the model's embedding not: the template then writes what has no row."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<added {number}>" for number in range(20)])
    beyond = "<added 15>"
    assert PromptEncoder(tokenizer, 300).encode_all(["Hi", beyond])[1] is None
    tokenizer.chat_template = beyond + str(tokenizer.chat_template)
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    command = ["train-head", str(folder), "--out", str(tmp_path / "head"), "--device", "cpu", "--steps", "1"]
    assert main([*command, "--prompts", str(prompts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "can be asked no evaluation prompt" in line
