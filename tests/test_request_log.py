"""The log of the server: one line for each request, ids in all lines of a request, nothing of what was said."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from engines import decoder
from local_engines import language_model
from serve_fakes import FakeEngine, app_for, call, live, until
from test_serve_streams import leave
from tiny import tiny_model

from forerun.serve.app import create_app
from forerun.serve.errors import try_later
from forerun.serve.local_engine import LocalEngine
from forerun.serve.log_lines import JsonLines, OfRequest
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret question"}], "max_tokens": 50}
NAMED = {"X-Request-Id": "mine-1"}


class Lines(logging.StreamHandler[io.StringIO]):
    """What the log would have, as JSON."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.addFilter(OfRequest())
        self.setFormatter(JsonLines())

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def of(self, request: str) -> list[dict[str, Any]]:
        return [line for line in self.all if line.get("request") == request]

    def one(self) -> dict[str, Any]:
        """The line of the only request, which may come a moment after its last byte."""
        until(lambda: self.requests)
        (line,) = self.requests
        return line

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [line for line in self.all if line["logger"] == "forerun.requests"]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("forerun")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line(lines: Lines, stream: bool) -> None:
    with live(app_for(FakeEngine())) as address:
        reply = call(address, CHAT, BODY | {"stream": stream}, headers=NAMED)
        line = lines.one()
    assert line["request"] == reply.headers["x-request-id"] == "mine-1"
    assert (line["client"], line["route"], line["status"], line["level"]) == ("127.0.0.1", f"POST {CHAT}", 200, "info")
    assert line["completion_tokens"] > 3 and line["cached_tokens"] == 0 and line["finish_reason"] == "stop"
    assert line["prompt_tokens"] > 10 and line["tokens_per_second"] == 20.0 and line["tokens_per_round"] > 1
    assert 0 <= line["first_token_seconds"] <= line["seconds"] < 20
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00", line["time"])
    text = lines.stream.getvalue()
    assert "secret" not in text and "Hello" not in text


def test_choices_and_limits(lines: Lines) -> None:
    with live(app_for(FakeEngine())) as address:
        call(address, "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2})
        line = lines.one()
    assert (line["route"], line["completion_tokens"], line["finish_reason"]) == ("POST /v1/completions", 8, "length")


def test_what_is_refused_and_what_fails_has_one_too(lines: Lines) -> None:
    engine = FakeEngine(fail_at_start=try_later(429, "full", "queue_full"))
    with live(app_for(engine)) as address:
        for status, path, body in (
            (400, CHAT, {"messages": []}),
            (429, CHAT, BODY),
            (404, "/v1/nothing%0Ahere and there", None),
            (404, "/v1/models/secret", None),
            (405, CHAT, None),
        ):
            before = len(lines.requests)
            assert call(address, path.replace(" ", "%20"), body).status == status
            until(lambda before=before: len(lines.requests) > before)
            line = lines.requests[-1]
            assert line["status"] == status and "finish_reason" not in line
        assert [line["route"] for line in lines.requests[2:4]] == [
            "GET /v1/nothing%0Ahere%20and%20there",
            "GET /v1/models/{model:path}",
        ]
        assert len({line["request"] for line in lines.requests}) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_told_under_its_request(lines: Lines, stream: bool) -> None:
    with live(app_for(FakeEngine(fail_after=1))) as address:
        call(address, CHAT, BODY | {"stream": stream}, headers=NAMED)
        line = lines.one()
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (200 if stream else 500, "error", 3)
    told, _ = lines.of("mine-1")
    assert told["level"] == "error" and "RuntimeError" in told["exception"]


@pytest.mark.parametrize(
    ("stream", "after", "status"), [(True, b"word", 200), (False, b"", 499), (True, b"HTTP/1.1 200", 200)]
)
def test_a_client_that_leaves_has_its_line(lines: Lines, stream: bool, after: bytes, status: int) -> None:
    engine = FakeEngine(say=lambda work: "word " * 400, pause=0.01)
    with live(app_for(engine)) as address:
        leave(address, BODY | {"stream": stream, "max_tokens": 900}, CHAT, after, engine)
        line = lines.one()
    assert (line["status"], line["finish_reason"]) == (status, "cancelled")
    assert after != b"word" or 0 < line["completion_tokens"] < 400


def test_what_is_asked_again_and_again_is_for_debugging(lines: Lines) -> None:
    log = logging.getLogger("forerun.requests")
    with live(app_for(FakeEngine())) as address:
        for path in ("/health", "/stats", "/page/main.js"):
            assert call(address, path).status == 200
        assert call(address, "/page/there_is_none.js").status == 404
        assert lines.one()["route"] == "GET /page/{name:path}"
        log.setLevel(logging.DEBUG)
        try:
            call(address, "/health")
            until(lambda: len(lines.requests) == 2)
        finally:
            log.setLevel(logging.NOTSET)


def test_warnings_alone(lines: Lines) -> None:
    logging.getLogger("forerun").setLevel(logging.WARNING)
    with live(app_for(FakeEngine())) as address:
        call(address, CHAT, BODY)
    assert lines.all == []


def test_the_engines_thread_knows_whose_failure_it_is(
    lines: Lines, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that fails, and an engine that does."""
    local = LocalEngine(ServeSettings())
    local.open(language_model(decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama"), quantize=False)))
    assert local.model is not None
    lookup = local.model.engine.drafters.by_name["lookup"]
    monkeypatch.setattr(lookup, "ready", lambda number: 1 / 0)
    service = ModelService("tiny", local, loaded=loaded_model(local.model, ServeSettings()))
    try:
        with live(create_app(service, ServeSettings())) as address:
            call(address, CHAT, BODY | {"speculative": {"draft": "lookup", "depth": 2}}, headers=NAMED)
            until(lambda: lines.requests)
            assert [line["level"] for line in lines.of("mine-1")] == ["warning", "info"]
            monkeypatch.setattr(local.model.engine.runner, "start", lambda *_: 1 / 0)
            assert call(address, CHAT, BODY, headers={"X-Request-Id": "mine-2"}).status == 500
            until(lambda: len(lines.requests) == 2)
            assert {line["level"] for line in lines.of("mine-2")} == {"error", "info"}
    finally:
        asyncio.run(local.close())


SCRIPT = """
import logging, sys
from forerun.serve.log_lines import set_up_log
from forerun.serve.request_log import CURRENT, ServedRequest
set_up_log(sys.argv[1], sys.argv[2])
logging.getLogger("forerun").info("ready")
CURRENT.set(ServedRequest("r-1"))
logging.getLogger("uvicorn.error").error("it failed")
logging.getLogger("forerun.requests").info("%s", "status=200", extra={"facts": {"status": 200}})
"""


@pytest.mark.parametrize(
    ("level", "form", "wanted"),
    [
        (
            "info",
            "text",
            ["INFO forerun: ready", "ERROR uvicorn.error [r-1]: it failed", "INFO forerun.requests [r-1]: status=200"],
        ),
        ("warning", "text", ["ERROR uvicorn.error [r-1]: it failed"]),
        ("warning", "json", ['"level": "error", "logger": "uvicorn.error", "request": "r-1", "message": "it failed"}']),
    ],
)
def test_the_two_forms(level: str, form: str, wanted: list[str]) -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT, level, form], capture_output=True, text=True, check=True)
    found = said.stderr.splitlines()
    assert len(found) == len(wanted)
    assert all(line.endswith(end) for line, end in zip(found, wanted, strict=True)), found
