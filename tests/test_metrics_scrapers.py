"""What scrapers of vLLM's metrics ask, byte by byte, and that what they take from the answer is so."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import PAGE, decoder
from local_engines import language_model
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from serve_fakes import call, live, until
from tiny import tiny_model

from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.metrics import Metrics
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

FOLDER = Path(__file__).parent / "data/scrapers"
PERIOD = 0.05  # seconds between two reads of the gateway
PLACES, CLIENTS, PAGES = 2, 5, 400


@dataclass(frozen=True)
class Picture:
    """What an endpoint picker keeps of a server."""

    waiting: int
    running: int
    usage: float
    block_size: int
    blocks: int


class Scraper:
    """One recorded client on one connection."""

    def __init__(self, name: str, address: str) -> None:
        lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        self.host = address.removeprefix("http://")
        asked = [line.replace("HOST", self.host) for line in lines if not line.startswith("#")]
        self.request = "\r\n".join([*asked, "", ""]).encode()
        host, port = self.host.split(":")
        self.connection = socket.create_connection((host, int(port)), timeout=20)

    def read(self) -> dict[str, Metric]:
        """By name; a family that comes twice is refused, as Go's parser does."""
        self.connection.sendall(self.request)
        response = http.client.HTTPResponse(self.connection)
        response.begin()
        assert response.status == 200 and response.getheader("content-type", "").startswith("text/plain")
        assert response.getheader("content-encoding") is None and not response.will_close
        families: dict[str, Metric] = {}
        for family in text_string_to_metric_families(response.read().decode()):
            assert family.name not in families
            families[family.name] = family
        return families

    def picture(self) -> Picture:
        families = self.read()
        values = {}
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
            family = families[f"vllm:{name}"]
            assert family.type == "gauge"
            (values[name],) = family.samples
        info = values["cache_config_info"]
        assert info.value == 1 and "vllm:lora_requests_info" not in families
        assert not [name for name in families if name.startswith("forerun:")]
        return Picture(
            int(values["num_requests_waiting"].value),
            int(values["num_requests_running"].value),
            values["kv_cache_usage_perc"].value,
            int(info.labels["block_size"]),
            int(info.labels["num_gpu_blocks"]),
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LocalEngine]]:
    """As with `--metrics-names vllm --max-running 2`."""
    settings = ServeSettings(metrics_names=("vllm",), max_running=PLACES)
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model, local = language_model(target, pages=PAGES), LocalEngine(settings)
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, settings))
    with live(create_app(service, settings, Metrics(local.readings, "tiny", settings.metrics_names))) as address:
        yield address, local
    asyncio.run(local.close())


def test_a_gateway_sees_what_there_is(served: tuple[str, LocalEngine]) -> None:
    address, local = served
    gateway, thread, model = Scraper("inference_gateway", address), local._thread, local.model
    assert thread is not None and model is not None
    assert gateway.picture() == Picture(0, 0, 0.0, PAGE, PAGES)
    body = {"prompt": list(range(10, 40)), "max_tokens": 200, "ignore_eos": True, "speculative": "off"}
    clients = [
        threading.Thread(target=call, args=(address, "/v1/completions", body | {"seed": number}))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    go_on = threading.Event()
    until(lambda: (local.state().running, local.state().waiting) == (PLACES, CLIENTS - PLACES))
    held = thread.call(lambda: go_on.wait(20))  # between two rounds everything stands still
    time.sleep(PERIOD)
    tables = [one.cache.blocks[0] for one in model.engine.scheduler.active]
    pages = len({page for table in tables for page in table})
    seen = gateway.picture()
    go_on.set()
    held.result(20)
    assert (seen.waiting, seen.running) == (CLIENTS - PLACES, PLACES) and len(tables) == PLACES
    assert seen.usage == pytest.approx(pages / PAGES) and pages > 2 * PLACES, "1 is all"
    seen_later = []
    while any(client.is_alive() for client in clients):
        time.sleep(PERIOD)
        seen_later.append(gateway.picture())
    assert all(one.running <= PLACES and 0 <= one.usage < 1 for one in seen_later)
    waiting = [one.waiting for one in seen_later]
    assert waiting == sorted(waiting, reverse=True), "none came"
    until(lambda: gateway.picture() == Picture(0, 0, 0.0, PAGE, PAGES))
    assert model.engine.pool.prefix.idle > 0, "what is only cached is free"


def test_prometheus_is_understood(served: tuple[str, LocalEngine]) -> None:
    prometheus, address = Scraper("prometheus", served[0]), served[0]
    before = prometheus.read()["vllm:generation_tokens"].samples[0].value
    assert call(address, "/v1/completions", {"prompt": "a", "max_tokens": 7, "ignore_eos": True}).status == 200
    until(lambda: prometheus.read()["vllm:generation_tokens"].samples[0].value == before + 7)
    assert prometheus.read()["vllm:num_requests_running"].samples[0].labels == {"model_name": "tiny"}
