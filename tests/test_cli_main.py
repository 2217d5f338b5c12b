"""The command line as a whole: help is light, and every failure is one line and the right exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a refused command; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("forerun: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import json, sys\n"
        "from forerun.cli.main import main\n"
        "codes = [main(['--help']), main(['generate', '--help']), main(['check', '--help']), main(['--version'])]\n"
        "print(json.dumps([codes, sorted({name.split('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    codes, modules = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0, 0, 0]
    assert not {"torch", "transformers", "numba", "numpy", "gguf", "huggingface_hub"} & set(modules)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("forerun ")


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["generate", "--nonsense"], "forerun generate --help"),
        (["generate", "stray"], "stray"),
        (["generate", "--draft", "magic"], "--draft"),
        (["generate", "--accept", "maybe"], "coupled"),
        (["generate", "--temp", "warm"], "--temp"),
        (["generate", "--max-tokens", "1.5"], "--max-tokens"),
        (["generate", "--dtype", "int3"], "float32"),
        (["generate", "--temp"], "--temp"),
        (["check"], "MODEL"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_usage_errors_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    line = refusal(capsys)
    assert words in line and "--help)" in line and "Value error" not in line


def test_a_forerun_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def inspect_model(model: str, **_: object) -> None:
        raise ForerunError(f"no model named {model}:\n  give a folder")

    monkeypatch.setattr(forerun, "inspect_model", inspect_model, raising=False)
    assert main(["check", "nowhere"]) == 2
    assert refusal(capsys) == "forerun: no model named nowhere: give a folder\n"


def test_an_interrupt_while_loading_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inspect_model(model: str, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(forerun, "inspect_model", inspect_model, raising=False)
    assert main(["check", "any"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def inspect_model(model: str, **_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(forerun, "inspect_model", inspect_model, raising=False)
    with pytest.raises(ZeroDivisionError):
        main(["check", "any"])


@pytest.mark.parametrize("write", ["print('x', flush=True)", "output_console().print('x')"])
def test_a_reader_that_leaves_ends_it_silently(write: str) -> None:
    """Rich turns it into an exit of its own."""
    program = (
        "import sys, types, forerun\n"
        "from forerun.cli.main import main\n"
        "from forerun.tables import output_console\n"
        "def inspect_model(model, **_):\n"
        "    while True:\n"
        f"        {write}\n"
        "forerun.inspect_model = inspect_model\n"
        "sys.exit(main(['check', 'any']))\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as for users
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), errors) == (141, b"")


@pytest.mark.parametrize(("flag", "code", "words"), [("--version", 0, "forerun "), ("--nonsense", 2, "--nonsense")])
def test_the_console_script_says_everything_before_it_is_gone(flag: str, code: int, words: str) -> None:
    program = "from forerun.cli.main import run; run(); print('not here')"
    done = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=False)
    assert done.returncode == code and words in done.stdout + done.stderr and "not here" not in done.stdout


def run_shell(line: str) -> subprocess.CompletedProcess[str]:
    """The console script with streams as a shell gives them; `$run` is its command."""
    program = f"{sys.executable} -c 'from forerun.cli.main import run; run()'"
    command = ["sh", "-c", line.replace("$run", program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("$run --version >&-", 0, ""),
        ("$run --nonsense 2>&-", 2, ""),
        ("$run generate -p - <&-", 2, "forerun: the prompt is empty"),
        ("$run generate <&-", 2, "forerun: no prompt"),
    ],
)
def test_closed_streams_are_empty_ones(line: str, code: int, words: str) -> None:
    done = run_shell(line)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith(words) and done.stderr.count("\n") == bool(words)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line() -> None:
    done = run_shell("$run --version >/dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("forerun: cannot write the output: No space left on device; make room")


def test_a_path_without_permission_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that may be listed and not entered, for example: whoever looks into it first is told so."""

    def refuse(path: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path / "config.json"))

    monkeypatch.setattr("forerun.weights.find._from_path", refuse)
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"forerun: {tmp_path / 'config.json'}: Permission denied\n"
