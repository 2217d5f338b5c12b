"""Converted GGUF files: kept complete or not at all, for everybody, whatever the file is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from tiny import tiny_gguf, tiny_model

from forerun.conversion import convert
from forerun.errors import ForerunError
from forerun.weights import gguf_convert
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.gguf_convert import convert_gguf

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama as a GGUF file."""
    folder = tmp_path_factory.mktemp("source")
    return tiny_gguf(folder / "tiny.gguf", tiny_model(folder / "model", "llama"), kind="Q8_0")


def test_the_second_call_converts_nothing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = convert_gguf(source, tmp_path)
    monkeypatch.setattr(gguf_convert, "_write", None)  # calling it would fail
    assert convert_gguf(source, tmp_path) == first
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]


def test_a_changed_file_is_converted_anew(tmp_path: Path, source: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(source.read_bytes())
    first = convert_gguf(file, tmp_path / "home")
    os.utime(file, (1, 1))
    assert convert_gguf(file, tmp_path / "home") != first


def test_leftovers_are_never_used(tmp_path: Path, source: Path) -> None:
    folder = convert_gguf(source, tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    (folder.parent / f".{folder.name}.abc").mkdir()
    assert convert_gguf(source, tmp_path) == folder
    assert weights.read_bytes() == whole
    assert not (folder.parent / f".{folder.name}.abc").exists()
    for spoilt in ("[]", '{"files": {"\\u0000": 1}}'):
        (folder / "forerun.json").write_text(spoilt)
        assert convert_gguf(source, tmp_path) == folder
        assert "config.json" in (folder / "forerun.json").read_text()


def test_two_processes_convert_once(tmp_path: Path, source: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from forerun.weights import gguf_convert as g\n"
        "write, made = g._write, []\n"
        "g._write = lambda *a: (made.append(1), write(*a))\n"
        "sys.stdin.readline()\n"
        "print(g.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2])), len(made))\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path)]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["0", "1"]
    assert open_checkpoint(Path(answers[0][0])).names()


def test_an_unwritable_home_is_one_line(tmp_path: Path, source: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(ForerunError, match="FORERUN_HOME"):
        convert_gguf(source, tmp_path / "home")


def test_a_name_that_is_no_utf_8_is_a_name_as_any_other(tmp_path: Path, source: Path) -> None:
    """Old archives have umlauts in other encodings; noting where the file is ended in a traceback."""
    file = tmp_path / os.fsdecode(b"m\xfcller.gguf")
    file.write_bytes(source.read_bytes())
    first = convert_gguf(file, tmp_path / "home")
    assert json.loads((first / "forerun.json").read_text())["path"] == str(file)
    os.utime(file, (1, 1))
    assert convert_gguf(file, tmp_path / "home") != first
    assert not first.exists()  # what was made of it before goes


def test_what_is_kept_does_not_depend_on_the_locale(tmp_path: Path, source: Path) -> None:
    """Where text is not UTF-8 by default, no converted folder of a file below one with an umlaut was found complete."""
    file = tmp_path / "müller" / "a.gguf"
    file.parent.mkdir()
    file.write_bytes(source.read_bytes())
    folder = convert_gguf(file, tmp_path / "home")
    program = (
        "import sys; from pathlib import Path; from forerun.weights import gguf_convert as g\n"
        "g._write = None\n"  # calling it would fail
        "print(g.convert_gguf(next(Path(sys.argv[1]).glob('*/a.gguf')), Path(sys.argv[1], 'home')).name)\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=os.environ | ascii_only, capture_output=True, text=True
    )
    assert done.stdout.strip() == folder.name, done.stderr


def test_what_was_made_of_a_file_before_goes_when_it_is_made_again(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    file, other = (tiny_gguf(tmp_path / name / "a.gguf", model) for name in ("here", "there"))
    os.utime(other, (1, 1))
    first, beside = (convert_gguf(each, tmp_path / "home") for each in (file, other))
    old = tmp_path / "home" / "gguf" / "a-0123456789abcdef"  # of a release that noted no path
    old.mkdir()
    (old / gguf_convert.MANIFEST).write_text(json.dumps({"format": 1, "source": "a.gguf", "files": {}}))
    foreign = tmp_path / "home" / "gguf" / "mine"
    foreign.mkdir()
    later = tmp_path / "home" / "gguf" / "a-fedcba9876543210"  # of a release to come, which is used in turns with ours
    later.mkdir()
    noted = {"format": gguf_convert.FORMAT + 1, "source": "a.gguf", "path": str(file), "files": {}}
    (later / gguf_convert.MANIFEST).write_text(json.dumps(noted))
    os.utime(file, (2, 2))
    second = convert_gguf(file, tmp_path / "home")
    assert second != first and convert_gguf(file, tmp_path / "home") == second
    left = {path.name for path in second.parent.iterdir()}
    assert left == {second.name, f"{second.name}.lock", beside.name, f"{beside.name}.lock", "mine", later.name}


@pytest.mark.parametrize("room", [2_000, 20_000])  # less than the tokenizer has, and less than the weights
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path, room: int) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # bytes of a file
    try:
        with pytest.raises(ForerunError, match=r"cannot convert .*: File too large; make room there"):
            convert_gguf(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.suffix for path in (tmp_path / "gguf").iterdir()] == [".lock"]


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_home(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"cannot read .*gone\.gguf: No such file"):
        convert_gguf(tmp_path / "gone.gguf", tmp_path)


@pytest.mark.parametrize(("mask", "files", "folders"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_others_may_read_what_was_converted_once(
    tmp_path: Path, source: Path, mask: int, files: int, folders: int
) -> None:
    """An image may be built by one user and run by another, whose home is what the first one converted."""
    before = os.umask(mask)
    try:
        folder = convert_gguf(source, tmp_path / "home")
        converted = convert(str(folder), tmp_path / "converted").folder
    finally:
        os.umask(before)
    for made in (folder, converted):
        assert made.stat().st_mode & 0o777 == folders
        assert {file.stat().st_mode & 0o777 for file in made.iterdir()} == {files}


def test_what_interrupted_conversions_left_goes_whichever_file_it_was_of(tmp_path: Path, source: Path) -> None:
    """A process that was killed leaves as much as a model takes; only the very same file ever cleared it away."""
    ended, running = (tmp_path / "gguf" / f".{name}-0123456789abcdef.abcd_123" for name in ("ended", "running"))
    for leftover in (ended, running):
        leftover.mkdir(parents=True)
        (leftover / "1.part").write_bytes(b"weights")
    foreign = tmp_path / "gguf" / ".snapshot"
    foreign.mkdir()
    with FileLock(tmp_path / "gguf" / "running-0123456789abcdef.lock"):
        convert_gguf(source, tmp_path)
    assert not ended.exists() and (running / "1.part").exists() and foreign.exists()
