"""The files in deploy/: the unit and the container start a server, and every panel of the dashboard has its metric."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from configparser import RawConfigParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from engines import decoder, request
from local_engines import ask, language_model
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import call, live
from tiny import tiny_model

import forerun
from forerun.cli.main import main
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.metrics import Metrics
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.run import model_names
from forerun.serve.settings import ServeSettings

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"forerun:\w+")
SELECTED = re.compile(r"(\w+)?\(?(forerun:\w+)\{(.*?)\}(\[.*?\])?")
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


class Started:
    """What a command line would have served."""

    model: str | None = None
    settings: ServeSettings

    def run(self, load: Callable[[], Any], settings: ServeSettings, model: str) -> None:
        self.settings, self.model = settings, model


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    fake, module = Started(), ModuleType("forerun.serve.run")
    module.run_server, module.model_names = fake.run, model_names  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "forerun.serve.run", module)
    monkeypatch.setattr(forerun, "load", lambda *_, **__: SimpleNamespace())
    return fake


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "forerun.service", encoding="utf-8")
    return parser


def test_the_unit_starts_a_server_with_the_settings_of_its_file(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = unit()
    assert parsed.sections() == ["Unit", "Service", "Install"] and parsed["Install"]["WantedBy"] == "multi-user.target"
    service = parsed["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/forerun/bin/forerun"
    monkeypatch.setenv("FORERUN_API_KEY", "mysecret")  # what EnvironmentFile brings
    assert main([word.replace("/etc/forerun", str(DEPLOY)) for word in words]) == 0
    written = tomllib.loads((DEPLOY / "forerun.toml").read_text(encoding="utf-8"))
    assert started.model == written.pop("model")
    for key, value in written.items():
        found = getattr(started.settings, key.replace("-", "_"))
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert float(service["TimeoutStopSec"]) > started.settings.drain_timeout
    assert service["Environment"] == f"HOME=/var/cache/{service['CacheDirectory']}"


def instructions() -> Iterator[tuple[str, str]]:
    """Of the Dockerfile, with lines that go on put together."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def test_the_container_serves_on_its_port_and_only_with_a_key(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dict(instructions())
    variables = dict(one.split("=") for one in found["ENV"].split())
    for name in set(variables) - {"HOME"}:
        monkeypatch.setenv(name, variables[name])
    words = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert words[0] == "forerun"
    assert main(words[1:]) == 2 and "FORERUN_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("FORERUN_API_KEY", "mysecret")
    assert main(words[1:]) == 0
    assert started.settings.host == "0.0.0.0" and started.model == "smollm2"
    assert str(started.settings.port) == found["EXPOSE"] == variables["FORERUN_PORT"]
    assert f"127.0.0.1:{found['EXPOSE']}/health" in found["HEALTHCHECK"]


def test_the_container_copies_what_is_there_and_what_it_may_see() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    assert "src" in copied and "pyproject.toml" in copied
    assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in ignored] == []


@pytest.mark.long
def test_what_the_container_installs_serves(tmp_path: Path) -> None:
    """Its steps for Python, in an environment with nothing in it; what else they do needs an engine for containers."""
    source, python = tmp_path / "source", tmp_path / "environment/bin/python"
    source.mkdir()
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    for word, rest in instructions():
        if word == "COPY":
            *names, place = rest.split()
            for name in names:
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
                    ROOT / name, source / (name if place == "./" else place)
                )
        for step in rest.split("&&") if word == "RUN" else ():
            if step.split()[0] == "pip":
                subprocess.run([python, "-m", *shlex.split(step)], cwd=source, check=True, timeout=600)
    command = [python.with_name("forerun"), "generate", "--prompt", "Hi", "--max-tokens", "4", "--json"]
    ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
    assert json.loads(ran.stdout)["completion_tokens"] >= 1


def test_the_proxy_is_not_narrower_than_the_server() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    body, patience = re.search(r"client_max_body_size (\d+)m;", text), re.search(r"proxy_read_timeout (\d+)s;", text)
    assert body is not None and int(body[1]) << 20 >= ServeSettings().max_body
    assert patience is not None and int(patience[1]) >= ServeSettings().request_timeout


def test_the_files_that_are_installed_exist() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL))
    names = set(re.findall(r"deploy/[\w.]+", shown))
    assert names == {"deploy/forerun.toml", "deploy/forerun.service", "deploy/Dockerfile"}
    assert all((ROOT / name).is_file() for name in names)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Every sample of a server that has answered with drafts, and its labels; read as Prometheus is told to read it."""
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    engine = LocalEngine(ServeSettings())
    engine.open(language_model(target))
    assert engine.model is not None
    service = ModelService("tiny", engine, loaded=loaded_model(engine.model, ServeSettings()))
    scrape = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/deploy.md").read_text(), re.DOTALL)[0])
    path = scrape["scrape_configs"][0]["metrics_path"]

    async def answered() -> None:
        for draft in ("lookup", "off"):
            await ask(engine, request([5, 6, 7, 5, 6, 7, 5, 6], max_tokens=30, draft=draft))

    asyncio.run(answered())
    with live(create_app(service, ServeSettings(api_key="k"), Metrics(engine.readings, "tiny"))) as address:
        assert call(address, path).status == 401
        text = call(address, path, headers={"Authorization": "Bearer k"}).text
    asyncio.run(engine.close())
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_every_panel_has_its_metrics(exported: dict[str, set[str]]) -> None:
    for expression in expressions():
        names = METRIC.findall(expression)
        assert names and not set(names) - set(exported), expression
        selected = SELECTED.findall(expression)
        assert [name for _, name, _, _ in selected] == names, "every metric is chosen by its model"
        for function, name, labels, window in selected:
            assert labels == 'model_name=~"$model"'
            counts = name.endswith(("_total", "_bucket"))
            assert (function in ("rate", "increase") and bool(window)) == counts, expression
        for grouped in re.findall(r" by \((\w+)\)", expression):
            assert any(grouped in exported[name] for name in names), expression
        assert expression.count("(") == expression.count(")")
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]


def test_every_metric_about_drafting_is_shown(exported: dict[str, set[str]]) -> None:
    shown = set(METRIC.findall(" ".join(expressions())))
    drafting = {name for name in exported if "spec_decode" in name and name.endswith("_total")}
    assert drafting and drafting <= shown


def test_grafana_can_import_it(exported: dict[str, set[str]]) -> None:
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    assert {"from", "to"} <= set(DASHBOARD["time"])
    assert len({panel["id"] for panel in PANELS}) == len(PANELS) >= 12
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries") and panel["title"] and panel["description"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not mine & taken, f"{panel['title']} lies on another panel"
        taken |= mine
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    source, model = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", model["query"]["query"]).groups()  # type: ignore[union-attr]
    assert model["name"] == "model" and label in exported[name]


def fleet_config(name: str) -> dict[str, Any]:
    """What Ray Serve reads of a file in deploy/."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    if name == "rayservice.yaml":
        assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    return found


@pytest.mark.parametrize("name", ["fleet.yaml", "rayservice.yaml"])
def test_a_fleet_can_be_deployed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own schema takes the file, and forerun its arguments."""
    from forerun.fleet.settings import plan_of

    config = fleet_config(name)
    (application,) = config["applications"]
    assert application["import_path"] == "forerun.fleet.ray_serve:build"
    http, key = config["http_options"], {"api_key": "k"} if name == "rayservice.yaml" else {}
    plan = plan_of(application["args"] | key)
    assert (plan.serving.host, plan.serving.port) == (http["host"], http["port"])
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install 'forerun[fleet]'")
    schema.ServeDeploySchema.model_validate(config)
    from forerun.fleet import ray_serve

    if key:
        monkeypatch.setenv("FORERUN_API_KEY", "k")
    monkeypatch.setattr(ray_serve, "_has_gpus", lambda _: False)
    assert ray_serve.build(application["args"]) is not None


def test_the_cluster_has_room_for_the_fleet() -> None:
    """Each worker of KubeRay holds a replica, and there are as many as the fleet may have."""
    spec = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterConfig"]
    arguments = fleet_config("rayservice.yaml")["applications"][0]["args"]
    (workers,) = spec["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["cpu"]) >= arguments["cpus"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (arguments["replicas"], arguments["max_replicas"])
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert {port["containerPort"] for port in head["ports"]} >= {8000, 8265}
    for one in (head, container):
        assert "FORERUN_API_KEY" in {entry["name"] for entry in one["env"]}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert f"ray=={spec['rayVersion']}" in pins


def test_the_image_of_a_fleet_builds_on_that_of_a_server() -> None:
    server, fleet = ((DEPLOY / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Dockerfile.fleet"))
    assert "FROM forerun\n" in fleet and "-t forerun ." in server
    extra = re.findall(r"'/source\[(\w+)\]'", fleet)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra == ["fleet"] and "fleet" in project["optional-dependencies"]
    assert "WORKDIR /source\n" in server and "constraints.txt" in server.split("COPY")[1]
