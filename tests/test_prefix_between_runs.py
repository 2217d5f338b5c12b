"""`cache=FILE` and `--cache FILE`: what one run has read the next one finds, and a wrong file loses nothing."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heads import ODD, SHAPE, random_head, write_head
from safetensors.torch import load_file, save_file
from tiny import tiny_model

import forerun
from forerun import ForerunError
from forerun.cli.main import main
from forerun.loading import PAGE
from forerun.serve.local_engine import LocalEngine

LOADING: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantize": "none"}
TEXT = "the cat and the dog and the rain in the north and the sun in the south of the land, " * 3
PROMPT = [5 + number % 200 for number in range(3 * PAGE + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m") / "tiny", "llama", **ODD)


def answer(folder: Path, cache: Path | None, **options: Any) -> tuple[int, Any, Any]:
    """Cached tokens, tokens and log probabilities of one run."""
    with forerun.load(folder, cache=cache, **LOADING, **options) as model:
        found = model.generate_tokens(PROMPT, max_tokens=8, temperature=0.8, seed=1)[0]
    return found.response.cached_tokens, found.tokens, found.logprobs


def test_a_model_that_is_closed_leaves_what_it_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    first, second, plain = answer(folder, path), answer(folder, path), answer(folder, None)
    assert first == (0, *plain[1:]) and second == (3 * PAGE, *plain[1:])
    model = forerun.load(folder, cache=str(path), **LOADING)
    size = path.stat().st_size
    forerun.generate(model, TEXT, max_tokens=4)
    assert path.stat().st_size == size
    model.close()
    assert path.stat().st_size > size
    path.unlink()
    model.close()
    assert not path.exists()


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    """One number in the middle of one tensor is enough."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[tensors[name].numel() // 2] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    path = tmp_path / "cache"
    answer(folder, path)
    whole = path.read_bytes()
    for wrong in (
        lambda: answer(other, path),
        lambda: answer(folder, path, head=write_head(tmp_path / "h", folder, SHAPE, random_head(SHAPE))),
        lambda: forerun.load(folder, device="cpu", cache=path),
    ):
        with pytest.raises(ForerunError, match="give another file"):
            wrong()
    assert path.read_bytes() == whole
    (folder / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ForerunError, match="another model"):
        answer(folder, path)
    (folder / "preprocessor_config.json").unlink()
    again = tmp_path / "copied"
    shutil.copytree(folder, again)
    assert answer(again, path)[0] == 3 * PAGE


def test_a_head_is_told_from_another(folder: Path, tmp_path: Path) -> None:
    heads = [write_head(tmp_path / f"{seed}", folder, SHAPE, random_head(SHAPE, seed)) for seed in (1, 2)]
    assert answer(folder, tmp_path / "cache", head=heads[0])[0] == 0
    assert answer(folder, tmp_path / "cache", head=heads[0])[0] == 3 * PAGE
    with pytest.raises(ForerunError, match="another set of drafters"):
        answer(folder, tmp_path / "cache", head=heads[1])


def test_weights_that_were_updated_leave_the_file_alone(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    plain = answer(folder, path)
    whole = path.read_bytes()
    with forerun.load(folder, cache=path, **LOADING) as model:
        tensors = {name: 1.1 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        model.update_weights(tensors)
        assert model.generate_tokens(PROMPT, max_tokens=8)[0].response.cached_tokens == 0
    assert path.read_bytes() == whole and answer(folder, path)[1:] == plain[1:]


def test_wrong_wishes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForerunError, match="drop one"):
        forerun.load(folder, cache=tmp_path / "cache", prefix_cache=False)
    with pytest.raises(ForerunError, match="is a folder"):
        forerun.load(folder, cache=tmp_path)
    with pytest.raises(ForerunError, match="name or a path"):
        forerun.load(folder, cache=7)  # type: ignore[arg-type]
    letter = tmp_path / "letter"
    letter.write_text("dear model")
    given = ["generate", "-m", str(folder), "-p", "x"]
    for wish, reason in (
        (["--cache", ""], "--cache is empty"),
        (["--cache", str(tmp_path / "cache"), "--no-prefix-cache"], "drop one of them"),
        (["--cache", str(letter)], "name another one"),
    ):
        assert main([*given, *wish]) == 2
        assert reason in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "--cache", "file"]) == 2
    assert "drop --cache" in capsys.readouterr().err
    assert letter.read_text() == "dear model"


def test_a_chat_goes_on_where_an_earlier_one_ended(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, path = [], tmp_path / "cache"
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n/stats\n/exit\n"))
        assert main(["chat", "-m", str(folder), "-n", "3", "--draft", "off", "--quiet", "--cache", str(path)]) == 0
        captured = capsys.readouterr()
        found = re.search(r"([0-9]+) of ([0-9]+) prompt tokens from the cache", captured.out + captured.err)
        said.append(0 if found is None else int(found[1]))
    assert said[0] == 0 and said[1] >= 2 * PAGE


def test_a_server_writes_it_at_its_end(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"

    async def serve(draining: bool) -> None:
        engine = LocalEngine()
        await engine.load(lambda: forerun.load(folder, cache=path, **LOADING))
        await (engine.drain(0) if draining else engine.close())

    asyncio.run(serve(draining=True))
    assert not path.exists()  # nothing was asked
    answer(folder, path)
    for draining in (True, False):
        os.utime(path, (0, 0))
        asyncio.run(serve(draining))
        assert path.stat().st_mtime > 0


def command(folder: Path | str, path: Path, *more: str) -> list[str]:
    program = "import sys; from forerun.cli.main import run; sys.argv = ['forerun', *sys.argv[1:]]; run()"
    given = ["generate", "-m", str(folder), "-p", TEXT, "-n", "20", "--cache", str(path)]
    return [sys.executable, "-c", program, *given, *more]


def test_processes_one_behind_the_other_and_at_once(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    told = []
    for _ in range(2):
        done = subprocess.run(command(folder, path, "--json"), capture_output=True, text=True, check=True)
        told.append(json.loads(done.stdout))
        assert "warning" not in done.stderr
    assert told[0]["cached_tokens"] == 0 and told[1]["cached_tokens"] == (told[0]["prompt_tokens"] - 1) // PAGE * PAGE
    assert told[0]["tokens"] == told[1]["tokens"]
    several = [subprocess.Popen(command(folder, path, "--json"), stdout=subprocess.PIPE) for _ in range(3)]
    answers = [json.loads(process.communicate()[0]) for process in several]
    assert all(one["tokens"] == told[0]["tokens"] and one["cached_tokens"] for one in answers)
    assert os.listdir(tmp_path) == ["cache"]


def test_a_full_disk_costs_a_line_and_no_answer(folder: Path, tmp_path: Path) -> None:
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command(folder, tmp_path / "cache", "--quiet")]
    done = subprocess.run(limited, capture_output=True, text=True, check=True)
    assert done.stdout.strip() and done.stderr.count("\n") == 1 and "was not written" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_ctrl_c_keeps_what_was_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    long = command(folder, path)
    long[long.index("20")] = "1500"
    process = subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130 and path.exists()
    assert json.loads(subprocess.check_output(command(folder, path, "--json")))["cached_tokens"] >= 2 * PAGE


@pytest.mark.real
def test_the_real_model(tmp_path: Path) -> None:
    """A prompt of several pages; drafts of its head and from the text."""
    path, text = tmp_path / "cache", TEXT * 8
    told = []
    for draft, file in (("mtp", path), ("mtp", path), ("auto", path), ("off", tmp_path / "other")):
        done = subprocess.run(
            [*command("smollm2", file, "--json", "--draft", draft, "-p", text)],
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(json.loads(done.stdout))
    full = (told[0]["prompt_tokens"] - 1) // PAGE * PAGE
    assert [one["cached_tokens"] for one in told] == [0, full, full, 0]
    assert all(one["tokens"] == told[3]["tokens"] for one in told)
    assert told[0]["drafted"] == told[1]["drafted"] > 0 and told[0]["accepted"] == told[1]["accepted"]
