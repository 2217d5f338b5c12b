"""What is not supported or makes no sense gets a 400 that names the parameter; nothing reaches the engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve_fakes import CONTEXT, FakeEngine, app_for, call, live

from forerun.serve.errors import ApiError
from forerun.serve.settings import ServeSettings

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with live(app_for(engine, ServeSettings(max_body=1 << 20, max_choices=4))) as address:
        yield address


def chat(address: str, **body: Any) -> Any:
    return call(address, "/v1/chat/completions", {"messages": MESSAGES, **body})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"unknown": 1}, "unknown"),
    ({"un known<>": 1}, "un known<>"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {}}, "audio"),
    ({"mirostat": 2}, "mirostat"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages[0].content[0].type"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0]"),
    ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]}, "messages[1].tool_calls"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": [[5, 101]]}, "logit_bias[0][1]"),
    ({"logit_bias": [[0.5, 1]]}, "logit_bias[0][0]"),
    ({"logit_bias": [[5]]}, "logit_bias[0]"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**400}, "n"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x" * 2000]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options.x"),
    ({"speculative": "eagle"}, "speculative"),
    ({"speculative": {"depth": 99}}, "speculative.depth"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "g"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"guided_json": "no"}, "guided_json"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_the_parameter(address: str, engine: FakeEngine, body: dict[str, Any], param: str) -> None:
    before = len(engine.started)
    for stream in ({}, {"stream": True}) if "stream_options" not in body else ({},):
        reply = chat(address, **stream, **body)
        assert reply.status == 400, reply.text
        assert reply.error["param"] == param, reply.text
        assert reply.error["type"] == "invalid_request_error"
    assert len(engine.started) == before


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "null", '"x"', "{}", '{"messages": ' + "[" * 100_000, '{"messages":"\\ud800"}', "\xff"]
)
def test_bodies_that_are_no_request(address: str, body: str) -> None:
    reply = call(address, "/v1/chat/completions", body.encode("latin-1"))
    assert reply.status == 400, reply.text
    assert reply.error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml"])
def test_a_body_is_json_whatever_it_is_called(address: str, kind: str) -> None:
    """curl calls every body a form. A web page elsewhere could send these without asking first: it says where it is."""
    body, headers = json.dumps({"messages": MESSAGES}), {"Content-Type": kind}
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
        assert call(address, path, body, headers=headers).status == 200
        for origin in ("https://evil.example", "null"):
            assert call(address, path, body, headers=headers | {"Origin": origin}).status == 403
    assert call(address, "/v1/messages", "a=b", headers=headers).status == 400


def test_lone_surrogates_are_not_text(address: str) -> None:
    reply = call(address, "/v1/chat/completions", '{"messages":[{"role":"user","content":"\\ud800"}]}')
    assert reply.status == 400


def test_prompts_that_do_not_fit_say_how_long_they_are(address: str) -> None:
    for stream in (False, True):
        reply = chat(address, messages=[{"role": "user", "content": "word " * CONTEXT}], stream=stream)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert reply.error["n_ctx"] == CONTEXT
        assert reply.error["n_prompt_tokens"] > CONTEXT
        huge = chat(address, messages=[{"role": "user", "content": "x" * 500_000}], stream=stream)
        assert huge.error["code"] == "context_length_exceeded"
        for refused in (reply, huge):  # LiteLLM and others look for OpenAI's words, not for the code
            assert f"This model's maximum context length is {CONTEXT} tokens" in refused.error["message"]


def test_too_many_messages_and_too_large_bodies(address: str) -> None:
    many = chat(address, messages=[{"role": "user", "content": ""}] * 10_001)
    assert many.status == 400
    for path in ("/v1/chat/completions", "/nothing", "/v1/messages"):
        large = call(address, path, b"[" + b" " * (1 << 20) + b"]")
        assert large.status == 413
        assert large.headers["connection"] == "close"


def test_a_body_is_counted_as_it_comes(address: str) -> None:
    """Nothing announces how long it is."""
    host, port = address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    chunks = (b" " * 100_000 for _ in range(1000))
    connection.request("POST", "/v1/chat/completions", chunks, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()


def test_a_full_queue_is_429_with_a_time_to_wait() -> None:
    engine = FakeEngine(fail_at_start=ApiError(429, "full", code="queue_full", headers={"Retry-After": "3"}))
    with live(app_for(engine)) as address:
        for stream in (False, True):
            reply = chat(address, stream=stream)
            assert (reply.status, reply.headers["retry-after"]) == (429, "3")
            assert reply.error == {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}


def test_a_kind_of_choice_that_is_not_known_is_named(address: str) -> None:
    reply = call(address, "/v1/responses", {"input": "x", "tool_choice": {"type": "web_search"}})
    assert reply.error["message"] == "Invalid 'tool_choice': 'web_search' is not known here."


def test_a_body_that_cannot_be_read_says_why(address: str) -> None:
    for body in (b'{"messages": "\xff"}', b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"):
        assert "UTF-8" in call(address, "/v1/chat/completions", body).error["message"]


ASK_MESSAGES: Any = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
LONG = "word " * 8 * CONTEXT
DIALECTS: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"input": LONG}, "input"),
    ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}},
     "text.format"),
    ("responses", {"input": [{"type": "poem"}]}, "input[0]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ("responses", {"input": "x", "speculative": {"draft": "auto", "depth": 99}}, "speculative.depth"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
     "output_config.format"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
     "messages[0].content[0].tool_use_id"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages[0].content[0]"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "rhyme": 1}]}]},
     "messages[0].content[0].rhyme"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages[0].content[0].text"),
    ("responses", {"input": "x", "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "rhyme": 1}]}]},
     "messages[0].content[0].rhyme"),
    ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "function": {}}]},
     "tools[0].function.name"),
    ("chat/completions", {"messages": MESSAGES, "metadata": {"a": {"b": [float("inf")]}}}, "metadata.a.b[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), DIALECTS)
def test_errors_name_the_field_as_the_client_wrote_it(
    address: str, path: str, body: dict[str, Any], param: str
) -> None:
    """No names of our own code, and no field of another dialect."""
    reply = call(address, f"/v1/{path}", {**ASK_MESSAGES, **body} if path == "messages" else body)
    assert reply.status == 400, reply.text
    if path == "messages":  # which has no place for it
        assert param in reply.error["message"] or "JSON schema" in reply.error["message"]
    else:
        assert reply.error["param"] == param
    assert "tag" not in reply.error["message"] and ".dict." not in reply.error["message"]
