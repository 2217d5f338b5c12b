"""Requests as real clients send them, written down by hand in data/clients: every one gets an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fake_chat import FakeChatService, ends, says, served
from fastapi import FastAPI

from forerun.serve.routes import messages, responses
from forerun.serve.settings import ServeSettings

FILES = sorted((Path(__file__).parent / "data/clients").glob("*.json"))
SERVED = ("/v1/responses", "/v1/messages")


def recorded() -> Iterator[Any]:
    for file in FILES:
        record = json.loads(file.read_text(encoding="utf-8"))
        assert record["client"] and record["source"]
        for request in record["requests"]:
            if request["path"].startswith(SERVED):
                yield pytest.param(request, id=f"{file.stem}: {request['what']}")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeChatService, str]]:
    service = FakeChatService()
    app = FastAPI()
    app.include_router(responses.router(service, ServeSettings()))
    app.include_router(messages.router(service, ServeSettings()))
    with served(app) as url:
        yield service, url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("request_", list(recorded()))
def test_it_is_answered(server: tuple[FakeChatService, str], request_: dict[str, Any], stream: bool) -> None:
    service, url = server
    service.play([*says("Hello ", "there"), *ends()])
    body = {**request_["body"], "stream": stream}
    if "count_tokens" in request_["path"]:
        del body["stream"]
    if not stream:
        body.pop("stream_options", None)
    reply = httpx.post(url + request_["path"], json=body, headers=request_.get("headers", {}))
    assert reply.status_code == 200, reply.text
    if "count_tokens" in request_["path"]:
        assert reply.json()["input_tokens"] > 0
        return
    assert "Hello there" in reply.text if not stream else re.search(r'"Hello ".*"there"', reply.text, re.DOTALL)


def test_nothing_a_client_says_is_lost(server: tuple[FakeChatService, str]) -> None:
    """Its words are in the prompt, but for the billing header and messages whose time is over."""
    service, url = server
    service.play([*says("Hi"), *ends()])
    for param in recorded():
        (request,) = param.values
        httpx.post(url + request["path"], json=request["body"], headers=request.get("headers", {}))
        prompt = "\n".join(str(message) for message in service.job.messages)
        assert "billing" not in prompt and "out of date" not in prompt
        last = request["body"].get("messages", request["body"].get("input"))[0]
        words = last.get("content", "") if isinstance(last, dict) else last
        for text in [words] if isinstance(words, str) else [part["text"] for part in words]:
            assert repr(text)[1:-1] in prompt


def test_claude_codes_tools_are_those_at_the_end(server: tuple[FakeChatService, str]) -> None:
    service, url = server
    service.play([*says("Hi"), *ends()])
    (first, *_) = json.loads((FILES[0].parent / "claude_code.json").read_text(encoding="utf-8"))["requests"]
    httpx.post(url + first["path"], json=first["body"], headers=first["headers"])
    assert [tool.name for tool in service.job.tools] == ["Bash", "Read", "mcp__notes__search"]
    assert service.job.template_options == {"reasoning_effort": "medium"}
