"""Every command in the documents runs, and every file they point to exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.bench.suites import work
from forerun.bench.workloads import ANSWER_TOKENS
from forerun.cli.main import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/benchmarks.md"]


def shell_lines() -> list[str]:
    lines = []
    for name in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / name).read_text(), re.DOTALL):
            lines += [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]
    return lines


COMMANDS = [line for line in shell_lines() if line.startswith("forerun ")]
TARGETS = [line for line in shell_lines() if line.startswith("make ")]


def test_every_line_is_one_of_ours() -> None:
    assert len(COMMANDS) >= 3 and len(TARGETS) >= 2
    assert set(shell_lines()) == set(COMMANDS + TARGETS)


@pytest.mark.real
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where pictures go
    monkeypatch.setattr(work, "PAIRS", 1)  # a benchmark of seconds, not of minutes
    for name in ANSWER_TOKENS:
        monkeypatch.setitem(ANSWER_TOKENS, name, 4)
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", sorted(set(TARGETS)))
def test_the_make_targets_exist(line: str) -> None:
    target = line.split("#")[0].split()[1]
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.real
def test_the_python_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_files_exist(name: str) -> None:
    document = ROOT / name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
        assert (document.parent / link).exists(), link


def test_architecture_names_real_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    names = re.findall(r"`((?:engine|draft|sample|kernels|models|cache|text)/[a-z_/0-9]+\.py)", text)
    assert len(names) >= 8
    for name in names:
        assert (ROOT / "src/forerun" / name).exists(), name
