"""Requests as real clients send them, written down by hand in data/clients: the whole server answers every one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_chat import FakeChatService, ends, played, says
from fastapi import APIRouter
from serve_fakes import END, FakeEngine, call, live

from forerun.serve.app import create_app
from forerun.serve.chat_job import ThinkingWish
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.routes import messages, responses
from forerun.serve.settings import ServeSettings

FOLDER = Path(__file__).parent / "data/clients"


def recorded(name: str = "*", *, paths: str = "/v1/") -> list[Any]:
    found = []
    for file in sorted(FOLDER.glob(f"{name}.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        assert record["client"] and record["source"]
        found += [
            pytest.param(request, id=f"{file.stem}: {request['what']}")
            for request in record["requests"]
            if request["path"].startswith(paths)
        ]
    assert found
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeEngine, str]]:
    """With room for long prompts: the tokenizer of tests spells everything out in bytes."""
    engine = FakeEngine(say=lambda work: "Hello there.")
    stops = frozenset({0, END})
    model = LoadedModel(tokenizer=engine.tokenizer, context=1 << 16, vocab=290, stop_ids=stops)
    with live(create_app(ModelService("tiny", engine, (), model), ServeSettings())) as address:
        yield engine, address


@pytest.fixture(scope="module")
def translator() -> Iterator[tuple[FakeChatService, str]]:
    """The two dialects over a service that remembers its jobs."""

    def both(service: Any, settings: ServeSettings) -> APIRouter:
        router = APIRouter()
        router.include_router(responses.router(service, settings))
        router.include_router(messages.router(service, settings))
        return router

    with played(both) as (service, url):
        service.play([*says("Hi"), *ends()])
        yield service, url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("request_", recorded())
def test_it_is_answered(server: tuple[FakeEngine, str], request_: dict[str, Any], stream: bool) -> None:
    body = {**request_["body"], "stream": stream}
    counted = "count_tokens" in request_["path"]
    if counted:
        del body["stream"]
    if not stream:
        body.pop("stream_options", None)
    reply = call(server[1], request_["path"], body, headers=request_.get("headers"))
    assert reply.status == 200, reply.text
    if counted:
        assert reply.json["input_tokens"] > 0
    elif body.get("max_tokens") == 1:
        assert '"H"' in reply.text
    elif stream:
        assert re.search(r"Hel?.*l?o.*the.*re", reply.text, re.DOTALL)
    else:
        assert "Hello there." in reply.text


@pytest.mark.parametrize("request_", [*recorded(paths="/v1/responses"), *recorded(paths="/v1/messages")])
def test_nothing_a_client_says_is_lost(translator: tuple[FakeChatService, str], request_: dict[str, Any]) -> None:
    """All its texts are in the prompt, but for the billing header and messages whose time is over."""
    service, url = translator
    call(url, request_["path"], request_["body"], headers=request_.get("headers"))
    prompt = "\n".join(strings(service.job.messages))
    said = list(strings(texts(request_["body"].get("messages") or request_["body"]["input"])))
    assert said
    for text in said:
        assert (text in prompt) == ("out of date" not in text)
    assert "billing" not in prompt


def texts(value: Any) -> Iterator[Any]:
    """Contents, outputs and arguments of messages and items."""
    if isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str):
                if key in ("text", "content", "output", "thinking"):
                    yield inner
            elif key not in ("tool", "tools", "action"):
                yield from texts(inner)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    else:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, str | list | dict):
                yield from strings(inner)


def test_claude_codes_tools_are_those_at_the_end(translator: tuple[FakeChatService, str]) -> None:
    service, url = translator
    (first,) = recorded("claude_code")[0].values
    call(url, first["path"], first["body"], headers=first["headers"])
    assert [tool.name for tool in service.job.tools] == ["Bash", "Read", "mcp__notes__search"]
    assert service.job.thinking == ThinkingWish(None, 8192)


def test_codex_can_read_the_list_of_models(server: tuple[FakeEngine, str]) -> None:
    """The fields of `ModelInfo` in its source that are neither optional nor have a default."""
    (model,) = call(server[1], "/v1/models?client_version=0.144.0").json["models"]
    assert model["slug"] == "tiny" and model["context_window"] == 1 << 16
    assert {
        "display_name",
        "supported_reasoning_levels",
        "shell_type",
        "visibility",
        "supported_in_api",
    } <= model.keys()
    assert {"priority", "support_verbosity", "truncation_policy", "experimental_supported_tools"} <= model.keys()
    assert model["truncation_policy"] == {"mode": "tokens", "limit": 10_000}
