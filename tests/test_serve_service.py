"""Health, models, properties, tokens and the page's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from engines import decoder
from local_engines import language_model
from prometheus_client import CollectorRegistry
from serve_fakes import CONTEXT, FakeEngine, app_for, call, live, loaded
from tiny import tiny_model, tiny_tokenizer

from forerun import __version__
from forerun.errors import ForerunError
from forerun.serve.app import create_app
from forerun.serve.metrics import Metrics
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.routes.page import POLICY, router
from forerun.serve.settings import ServeSettings
from forerun.text.template import read_template
from forerun.text.tokenizer import Tokenizer

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(app_for(FakeEngine(), ServeSettings(api_key=None))) as address:
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
        for path in ("/health", "/v1/health", "/ready"):
            assert (call(address, path).status, call(address, path).json) == (200, {"status": "ok"})
        for status in ("draining", "broken"):
            engine.status = status
            assert call(address, "/health").status == call(address, "/ready").status == 503
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


def test_several_names_and_any_name() -> None:
    engine = FakeEngine()
    service = ModelService("a", engine, ("b",), loaded(engine), listed=("a", "b"), any_name=True)
    with live(create_app(service, ServeSettings())) as address:
        assert [one["id"] for one in call(address, "/v1/models").json["data"]] == ["a", "b"]
        for name in ("b", "gpt-4o"):
            assert call(address, "/v1/chat/completions", BODY | {"model": name}).json["model"] == "a"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", BODY),
        ("/chat/completions/input_tokens", BODY),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/messages", BODY | {"model": "tiny", "max_tokens": 9}),
        ("/messages/count_tokens", BODY | {"model": "tiny"}),
        ("/models", None),
        ("/models/org/tiny", None),
    ],
)
def test_addresses_without_a_prefix(address: str, path: str, body: dict[str, Any] | None) -> None:
    assert call(address, path, body).json.keys() == call(address, f"/v1{path}", body).json.keys()
    assert call(address, path, body).status == 200
    assert call(address, f"/x{path}", body).status == 404


def test_errors_without_a_prefix_have_the_form_of_their_dialect(address: str) -> None:
    assert call(address, "/messages", {}).json["type"] == "error"


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    """It is shown, its ends of turns end answers, and what it thinks is thinking."""
    source = "{% for m in messages %}<think>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    model = language_model(decoder(tiny_model(tmp_path / "m", "llama", num_hidden_layers=1), quantize=False))
    model.tokenizer, model.stop_ids = tiny_tokenizer(), frozenset({0})
    own = loaded_model(model, ServeSettings(chat_template=str(tmp_path / "own.jinja")))
    assert own.tokenizer.chat_template == source and own.format.reasoning == "think"
    assert 2 in own.stop_ids
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(ForerunError, match=r"broken\.jinja is no Jinja template"):
        read_template(tmp_path / "broken.jinja")


@pytest.mark.parametrize("of_a_gguf", [False, True])
def test_the_settings_of_the_tokenizer(of_a_gguf: bool) -> None:
    """GGUF files have the library's own tokenizer, folders have transformers'."""
    engine = FakeEngine()
    known = engine.tokenizer
    if of_a_gguf:
        own = Tokenizer(known.backend_tokenizer, known.special_tokens_map, known.chat_template)
        engine.tokenizer = cast(Any, own)
    with live(app_for(engine)) as address:
        assert call(address, "/tokenizer_info").json == {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<unk>",
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": known.chat_template,
        }


def test_requests_are_counted_by_route_and_status() -> None:
    """Not by address: a client could make up as many as it likes."""

    class Numbers:
        registry = CollectorRegistry()

        def render(self) -> bytes:
            return b""

    engine, numbers = FakeEngine(), Numbers()
    app = create_app(ModelService("tiny", engine, (), loaded(engine)), ServeSettings(), cast(Metrics, numbers))
    with live(app) as address:
        for path in ("/models/tiny", "/v1/models/tiny", "/v1/models/other", "/what/ever"):
            call(address, path)
        call(address, "/v1/chat/completions", BODY)
        call(address, "/health", method="BREW")

    def count(*labels: str) -> float | None:
        names = ("method", "handler", "status")
        return numbers.registry.get_sample_value("http_requests_total", dict(zip(names, labels, strict=True)))

    assert count("GET", "/v1/models/{model:path}", "200") == 2
    assert count("GET", "/v1/models/{model:path}", "404") == 1
    assert count("GET", "none", "404") == 1
    assert count("POST", "/v1/chat/completions", "200") == 1
    assert count("BREW", "/health", "405") is None


def test_head_of_the_page(address: str) -> None:
    reply = call(address, "/", method="HEAD")
    assert (reply.status, reply.text) == (200, "")


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


@pytest.mark.parametrize("form", ["TEXT", "json", "BIN", None])
def test_the_load_comes_with_an_answer_for_who_asks(form: str | None) -> None:
    engine = FakeEngine(running=3)
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with live(app_for(engine)) as address:
        told = call(address, "/v1/chat/completions", body, headers=headers).headers.get("endpoint-load-metrics")
    text = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=0"
    data = 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 0}}'
    assert told == {"TEXT": text, "json": data}.get(form or "")
