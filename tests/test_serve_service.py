"""Health, models, properties, tokens and the page's files."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from serve_fakes import CONTEXT, FakeEngine, app_for, call, live, loaded

from forerun import __version__
from forerun.serve.app import create_app
from forerun.serve.model_service import ModelService
from forerun.serve.routes.page import POLICY, router
from forerun.serve.settings import ServeSettings

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(app_for(FakeEngine(), ServeSettings(api_key=None, served_name="x"))) as address:
        yield address


def test_health_tells_loading_ready_draining_and_broken() -> None:
    engine = FakeEngine(status="loading")
    service = ModelService("tiny", engine)
    with live(create_app(service, ServeSettings())) as address:
        reply = call(address, "/health")
        assert reply.status == 503
        assert reply.json == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        waiting = call(address, "/v1/chat/completions", BODY)
        assert (waiting.status, waiting.error["type"], waiting.headers["retry-after"]) == (
            503,
            "unavailable_error",
            "5",
        )
        assert call(address, "/v1/models").status == 503
        assert call(address, "/stats").json["status"] == "loading"
        engine.status = "ready"
        service.ready(loaded(engine))
        for path in ("/health", "/v1/health"):
            assert (call(address, path).status, call(address, path).json) == (200, {"status": "ok"})
        for status in ("draining", "broken"):
            engine.status = status
            assert call(address, "/health").status == 503
            assert call(address, "/v1/chat/completions", BODY).status == 503


def test_models(address: str) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("org/tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    listed = call(address, "/v1/models").json
    assert listed["models"][0]["slug"] == "tiny", "what Codex reads"
    assert listed["data"][0]["max_model_len"] == CONTEXT


def test_properties_show_settings_but_no_secrets() -> None:
    with live(app_for(FakeEngine(), ServeSettings(api_key="sk-hidden"))) as address:
        reply = call(address, "/props", headers={"x-api-key": "sk-hidden"})
        assert reply.json["context"] == CONTEXT
        assert reply.json["settings"]["max_queue"] == 256
        assert "sk-hidden" not in reply.text
        assert "api_key" not in reply.text


def test_properties_show_the_sampling_that_holds() -> None:
    with live(app_for(FakeEngine(), generation_defaults={"temperature": 0.2, "top_k": 40})) as address:
        shown = call(address, "/props").json["generation_defaults"]
    assert shown == {
        "temperature": 0.2, "top_p": 1.0, "top_k": 40, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


def test_version_and_state(address: str) -> None:
    assert call(address, "/version").json == {"version": __version__}
    state = call(address, "/stats").json
    assert (state["status"], state["cache_usage"], state["tokens_per_second"]) == ("ready", 0.25, 12.5)


def test_tokens_there_and_back(address: str) -> None:
    text = "Héllo 🦊"
    llama = call(address, "/tokenize", {"content": text, "with_pieces": True}).json
    vllm = call(address, "/tokenize", {"prompt": text}).json
    assert [token["id"] for token in llama["tokens"]] == vllm["tokens"]
    assert any(isinstance(token["piece"], list) for token in llama["tokens"]), "bytes where a character is cut"
    assert call(address, "/detokenize", {"tokens": vllm["tokens"]}).json == {"content": text, "prompt": text}
    assert call(address, "/tokenize", {"content": ""}).json["tokens"] == []
    for body in ({}, {"content": "a", "prompt": "b"}, {"content": 1}, {"content": "x" * 200_000}):
        assert call(address, "/tokenize", body).status == 400
    for tokens in ([290], [-1], [2**40], "a", [1.5]):
        assert call(address, "/detokenize", {"tokens": tokens}).status == 400


def test_the_document_is_there_but_no_page_from_elsewhere(address: str) -> None:
    document = call(address, "/openapi.json").json
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(document["paths"])
    assert call(address, "/docs").status == 404
    assert call(address, "/redoc").status == 404


def test_the_page_is_served_under_a_strict_policy() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.include_router(router({"/": b"<html>", "/page/index.html": b"<html>", "/page/a/app.js": b"1"}))
    with live(app) as address:
        for path, kind in (
            ("/", "text/html"),
            ("/page/index.html", "text/html"),
            ("/page/a/app.js", "text/javascript"),
        ):
            reply = call(address, path)
            assert reply.status == 200
            assert reply.headers["content-type"].startswith(kind)
            assert reply.headers["content-security-policy"] == POLICY
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
    assert "'unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
    with live(app_for(FakeEngine(), ServeSettings(page=False))) as address:
        for path in ("/", "/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/"):
            assert call(address, path).status == 404
