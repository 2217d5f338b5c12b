"""`forerun serve` in front of a fake server: where settings come from, what is printed first, what is refused."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import forerun
from forerun import memory_plan
from forerun.cli.main import main
from forerun.cli.serve_screen import base_url
from forerun.errors import ForerunError
from forerun.memory_plan import MemoryPlan, PlannedDrafter
from forerun.serve import settings_check
from forerun.serve.run import model_names
from forerun.serve.settings import ServeSettings
from forerun.serve.settings_check import free_port, is_loopback

MIB = 2**20
PLAN = MemoryPlan(
    weights=100 * MIB,
    drafters=[PlannedDrafter("lookup", "in the text", 0, 0), PlannedDrafter("mtp", "the head tiny", 3 * MIB, 2 * MIB)],
    cache=50 * MIB,
    cache_tokens=4096,
    context=1024,
    state=0,
    left=900 * MIB,
)


class FakeServer:
    """Stands in for `forerun.load` and `run_server`; remembers what they were given."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.loading: dict[str, Any] = {}
        self.settings: ServeSettings | None = None

    def load(self, model: str, **loading: Any) -> Any:
        self.model, self.loading = model, loading
        return SimpleNamespace(notes=[], head_warnings=[], media=None, probe=SimpleNamespace(guaranteed=True))

    def run(self, load: Callable[[], Any], settings: ServeSettings, model: str) -> None:
        self.settings, self.served = settings, model
        load()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake, module = FakeServer(), ModuleType("forerun.serve.run")
    module.run_server, module.model_names = fake.run, model_names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forerun.serve.run", module)
    monkeypatch.setattr(forerun, "load", fake.load)
    monkeypatch.setattr(memory_plan, "memory_plan", lambda loaded: PLAN)
    monkeypatch.setattr(settings_check, "free_port", lambda host, port: port)  # nothing is opened here
    return fake


def config(folder: Path, text: str) -> str:
    file = folder / "forerun.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def refuse(argv: list[str], capsys: pytest.CaptureFixture[str], server: FakeServer) -> str:
    assert main(["serve", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("forerun: ") and err.count("\n") == 1, err
    assert server.model is None and server.settings is None
    return err


def test_defaults_go_to_the_server(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 0
    assert server.settings == ServeSettings()
    assert server.model == "smollm2" and server.loading["head"] == "auto" and server.loading["device"] == "auto"
    out = capsys.readouterr().out
    assert "serving smollm2 at http://127.0.0.1:8000/v1" in out and "page: http://127.0.0.1:8000/\n" in out
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in out and "Bearer" not in out


def test_the_plan_names_the_drafter_and_what_is_left(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert server.settings is None, "a dry run serves nothing"
    assert "drafter mtp" in out and "the head tiny: 3.0 MiB weights, 2.0 MiB cache" in out
    assert "155.0 MiB" in out and "900.0 MiB left" in out and "4,096 tokens" in out


def test_flags_win_over_variables_and_variables_over_the_file(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, 'port = 1\nmax-queue = 2\nmax_stops = 3\nallowed-hosts = ["a", "b,c"]\nmodel = "mine"\n')
    monkeypatch.setenv("FORERUN_PORT", "11")
    monkeypatch.setenv("FORERUN_MAX_QUEUE", "12")
    assert main(["serve", "--config", file, "--port", "21"]) == 0
    assert server.settings == ServeSettings(port=21, max_queue=12, max_stops=3, allowed_hosts=("a", "b", "c"))
    assert server.model == "mine"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["port", "21", "--port"] in lines and ["max-queue", "12", "FORERUN_MAX_QUEUE"] in lines
    assert ["max-stops", "3", file] in lines and ["model", "mine", file] in lines
    assert not [line for line in lines if line[:1] == ["ping"]], "defaults are not listed"


@pytest.mark.parametrize("entry", [entry.name for entry in fields(ServeSettings)])
def test_every_setting_can_be_set_in_all_three_ways(
    entry: str, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = getattr(ServeSettings(), entry)
    typed, written, wanted = {
        bool: (str(not default).lower(), str(not default).lower(), not default),
        int: ("7", "7", 7),
        float: ("2.5", "2.5", 2.5),
        tuple: ("x,y", '["x", "y"]', ("x", "y")),
    }.get(type(default), ("localhost", '"localhost"', "localhost"))
    if entry.startswith("default_"):
        typed, written, wanted = "1", "1", 1
    if entry == "kv_events_topic":
        monkeypatch.setenv("FORERUN_KV_EVENTS", "tcp://127.0.0.1:5557")  # of which it is the topic
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    words = {"tool_parser": "mistral", "reasoning_parser": "mistral", "reasoning": "low"}
    words |= {"chat_template": str(tmp_path / "own.jinja"), "kv_events": "tcp://127.0.0.1:5557"}
    if word := words.get(entry):
        typed, written, wanted = word, f'"{word}"', word
    if entry == "metrics_names":
        typed, written, wanted = "vllm,forerun", '["vllm", "forerun"]', ("vllm", "forerun")
    flag = "--" + entry.replace("_", "-")
    typing = [flag, typed] if not isinstance(default, bool) else [f"--no-{entry}" if default else flag]
    assert main(["serve", *typing]) == 0
    assert server.settings is not None and getattr(server.settings, entry) == wanted
    assert main(["serve", "--config", config(tmp_path, f"{flag[2:]} = {written}")]) == 0
    assert getattr(server.settings, entry) == wanted
    monkeypatch.setenv(f"FORERUN_{entry.upper()}", typed)
    assert main(["serve"]) == 0
    assert getattr(server.settings, entry) == wanted


def test_sampling_defaults_may_be_zero(server: FakeServer, tmp_path: Path) -> None:
    assert main(["serve", "--default-temperature", "0", "--default-top-k", "0"]) == 0
    assert server.settings is not None and server.settings.sampling_defaults == {"temperature": 0.0, "top_k": 0}
    assert main(["serve", "--config", config(tmp_path, "default-top-p = 0.9\ndefault-min-p = 0")]) == 0
    assert server.settings.sampling_defaults == {"top_p": 0.9, "min_p": 0.0}


def test_the_models_own_options_reach_the_loader(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_QUANTIZE", "none")
    assert main(["serve", "folder", "--dtype", "float32", "--max-context", "64", "--head", "h"]) == 0
    assert server.model == "folder"
    wanted = {"dtype": "float32", "quantize": "none", "max_context": 64, "head": "h", "draft_model": None}
    assert {name: server.loading[name] for name in wanted} == wanted
    assert main(["serve", "-m", "other"]) == 0
    assert server.model == "other"


def test_memory_for_the_cache_can_be_set_in_all_three_ways(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, 'memory = "6G"\n')
    for argv, wanted in ((["--config", file], "6G"), (["--config", file, "--memory", "0.5"], "0.5")):
        assert main(["serve", *argv]) == 0
        assert server.loading["memory"] == wanted
        assert ["memory", wanted] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setenv("FORERUN_MEMORY", "512M")
    assert main(["serve"]) == 0
    assert server.loading["memory"] == "512M"
    server.model = server.settings = None
    capsys.readouterr()
    assert "bytes (512M, 6G), not '-3'" in refuse(["--memory", "-3"], capsys, server)


def test_keys_are_never_shown(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "very-secret")
    assert main(["serve", "--host", "0.0.0.0"]) == 0
    assert server.settings is not None and server.settings.api_key == "very-secret"
    out, err = capsys.readouterr()
    assert "very-secret" not in out + err
    assert "••••" in out and "FORERUN_API_KEY" in out and "http://127.0.0.1:8000/" in out
    assert '"$FORERUN_API_KEY"' in out, "the line to paste takes the key from the environment"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org", ""])
def test_other_addresses_need_a_key(host: str, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--api-key or FORERUN_API_KEY" in refuse(["--host", host], capsys, server)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_needs_none(host: str, server: FakeServer) -> None:
    assert main(["serve", "--host", host]) == 0
    assert server.settings is not None
    assert server.settings.host == host.strip("[]"), "sockets know no brackets"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "did you mean port?"),
        ("max_que = 1", "did you mean max-queue?"),
        ("dry_run = true", "there is no setting 'dry_run'"),
        ("xyzzy = 1", "forerun serve --help"),
        ('port = "8000"', "port must be a whole number, not '8000'"),
        ("port = 80.5", "a whole number"),
        ("port = true", "a whole number"),
        ("page = 1", "page must be true or false"),
        ("host = 5", "host must be a text in quotes"),
        ('allowed-hosts = "a"', "a list of texts"),
        ('ping = "soon"', "ping must be a number"),
        ('dtype = "float3"', "one of auto, float32, bfloat16, float16"),
        ("[network]\nport = 1", "there is no setting 'network'"),
        ("max-queue = 1\nmax_queue = 2", "there twice"),
        ("port = ", "is not TOML"),
    ],
)
def test_mistakes_in_the_file_are_one_line(
    text: str, said: str, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(tmp_path, text)
    line = refuse(["--config", file], capsys, server)
    assert said in line and file in line


def test_mistakes_elsewhere_are_one_line(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "two models" in refuse(["a", "--model", "b"], capsys, server)
    assert "two drafters" in refuse(["--head", "a", "--draft-model", "b"], capsys, server)
    assert "--port" in refuse(["--port", "x"], capsys, server)
    assert "65535" in refuse(["--port", "70000"], capsys, server)
    assert "--max-running 0" in refuse(["--max-running", "0"], capsys, server)
    assert "--max-stops 17" in refuse(["--max-stops", "17"], capsys, server)
    assert "https://app.example" in refuse(["--allowed-origins", "localhost/chat"], capsys, server)
    assert "cannot read the chat template" in refuse(["--chat-template", "no such file"], capsys, server)
    assert "one of auto, off, minimal" in refuse(["--reasoning", "much"], capsys, server)
    for number in ("nan", "inf", "-1", "0"):
        assert f"--ping {float(number)}" in refuse(["--ping", number], capsys, server)
    for flag, value in (("--default-temperature", "-0.5"), ("--default-top-p", "2.0"), ("--default-top-k", "-1")):
        assert f"{flag} {value}: {flag[10:].replace('-', '_')} must be" in refuse([flag, value], capsys, server)
    assert "as tcp://127.0.0.1:5557" in refuse(["--kv-events", "5557"], capsys, server)
    events = ["--kv-events", "tcp://127.0.0.1:5557"]
    assert "leave out --no-prefix-cache" in refuse([*events, "--no-prefix-cache"], capsys, server)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: find(name, *more) if name != "zmq" else None)
    assert "pip install 'forerun[events]'" in refuse(events, capsys, server)
    assert "one of auto, none, hermes" in refuse(["--tool-parser", "x"], capsys, server)
    assert "one of auto, none, think" in refuse(["--reasoning-parser", "x"], capsys, server)
    assert "printable" in refuse(["--api-key", "a b"], capsys, server)
    assert "cannot read" in refuse(["--config", "/there/is/none"], capsys, server)
    monkeypatch.setenv("FORERUN_PORT", "x")
    assert "FORERUN_PORT" in refuse([], capsys, server)


def test_ports_are_tried_before_a_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ForerunError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; try --port 0"):
            free_port("127.0.0.1", port)
        assert free_port("127.0.0.1", 0) not in (0, port)
    assert free_port("127.0.0.1", port) == port
    with pytest.raises(ForerunError, match=r"cannot listen on 192\.0\.2\.1:0"):
        free_port("192.0.2.1", 0)


def test_addresses() -> None:
    assert base_url("::1", 80) == base_url("[::1]", 80) == "http://[::1]:80"
    assert base_url("::", 80) == base_url("0.0.0.0", 80) == "http://127.0.0.1:80"


def test_a_misspelt_variable_is_refused(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_HOME", "/tmp")
    monkeypatch.setenv("FORERUN_MAX_QUEU", "9")
    assert "FORERUN_MAX_QUEU: did you mean FORERUN_MAX_QUEUE?" in refuse([], capsys, server)
