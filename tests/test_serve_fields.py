"""What clients send beside the fields of the documents: null is absent, and what cannot change the text is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serve_fakes import FakeEngine, app_for, call, live

from forerun.serve.dialects.notes import HEADER
from forerun.serve.settings import ServeSettings

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}
MESSAGE = {"model": "tiny", "max_tokens": 9, "messages": MESSAGES}
ADDRESSES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": MESSAGE,
}

# What is taken for another reason than being supported, by the clients that send it.
TAKEN: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "functions": [], "function_call": "none", "verbosity": "low", "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "Hi"}, "store": True, "user": "u", "metadata": {"a": "b"},
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s",
    },
    "OpenRouter": {
        "provider": {"order": ["a"]}, "usage": {"include": True}, "models": ["a", "b"], "route": "fallback",
        "transforms": ["middle-out"], "plugins": [], "include_reasoning": True, "top_a": 0,
    },
    "vLLM": {
        "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "priority": 0, "request_id": "x",
        "spaces_between_special_tokens": True, "return_tokens_as_token_ids": True,
        "prompt_logprobs": 0, "kv_transfer_params": {}, "detokenize": True, "bad_words": [],
    },
    "sglang": {
        "rid": "x", "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
        "session_params": {}, "extra_key": "k",
    },
    "llama.cpp": {
        "cache_prompt": True, "id_slot": -1, "n_keep": 0, "timings_per_token": True, "parse_tool_calls": True,
        "reasoning_format": "auto", "typical_p": 1.0, "typ_p": 1, "mirostat": 0, "mirostat_tau": 5.0,
        "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0,
        "dry_base": 1.75, "repeat_last_n": -1, "n_probs": 0, "lora": [], "backend_sampling": False,
        "verbose": True,
    },
    "LiteLLM": {"num_retries": 2, "timeout": 600, "drop_params": True, "tags": ["a"], "fallbacks": ["b"]},
    "Ollama": {"keep_alive": "5m"},
}  # fmt: skip
# What wrappers that send everything have in it where nothing was asked for.
NULLS = [
    "functions", "function_call", "audio", "prediction", "verbosity", "prompt_cache_retention", "best_of",
    "logit_bias", "logprobs", "n", "seed", "stop", "temperature", "top_p", "tools", "tool_choice", "user",
    "metadata", "response_format", "stream_options", "web_search_options", "reasoning", "max_completion_tokens",
    "parallel_tool_calls", "extra_body", "modalities", "truncate_prompt_tokens", "guided_json", "thinking",
]  # fmt: skip
CHANGING: dict[str, Any] = {
    "functions": [{"name": "f"}], "audio": {"voice": "x"}, "web_search_options": {}, "mirostat": 2, "typical_p": 0.5,
    "best_of": 3, "bad_words": ["x"], "samplers": ["top_k"], "grammar": "root ::= x", "tempreature": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with live(app_for(engine)) as address:
        yield address


@pytest.fixture(scope="module")
def strict() -> Iterator[str]:
    with live(app_for(FakeEngine(), ServeSettings(strict_fields=True))) as address:
        yield address


def chunks_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("client", TAKEN)
def test_what_changes_no_text_is_taken_and_named(address: str, path: str, client: str) -> None:
    for stream in (False, True):
        reply = call(address, path, ADDRESSES[path] | TAKEN[client] | {"stream": stream})
        assert reply.status == 200, reply.text
        named = reply.headers[HEADER.lower()].removeprefix("not used: ").split(", ")
        supported = {"best_of"} if path == "/v1/completions" else set()
        assert set(named) == set(TAKEN[client]) - supported


@pytest.mark.parametrize("path", ADDRESSES)
def test_every_dialect_takes_them(address: str, path: str) -> None:
    sent = {"provider": {"order": []}, "cache_prompt": True, "mirostat": 0, "priority": 1}
    reply = call(address, path, ADDRESSES[path] | sent)
    assert reply.status == 200, reply.text
    assert all(name in reply.headers[HEADER.lower()] for name in sent)


@pytest.mark.parametrize("path", ADDRESSES)
def test_null_is_absent(address: str, path: str) -> None:
    """At the top and inside."""
    body = dict.fromkeys(NULLS) | ADDRESSES[path] | {"speculative": {"draft": None, "depth": None, "more": None}}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "Hi", "audio": None, "function_call": None}]
        body["stream_options"] = {"include_usage": None, "continuous_usage_stats": None}
    reply = call(address, path, body)
    assert reply.status == 200, reply.text
    assert "null" not in reply.headers.get(HEADER.lower(), "") and "audio" not in reply.headers.get(HEADER.lower(), "")


@pytest.mark.parametrize("path", ADDRESSES)
@pytest.mark.parametrize("name", CHANGING)
def test_what_may_change_the_text_is_refused_by_its_name(address: str, path: str, name: str) -> None:
    reply = call(address, path, ADDRESSES[path] | {name: CHANGING[name]})
    assert reply.status == 400 and reply.error["message"].startswith(f"'{name}'"), reply.text


@pytest.mark.parametrize("path", ADDRESSES)
def test_strict_servers_refuse_all_that_they_do_not_have(strict: str, path: str) -> None:
    assert call(strict, path, ADDRESSES[path]).status == 200
    for name, value in {"provider": {}, "mirostat": 0, "audio": None, "functions": []}.items():
        reply = call(strict, path, ADDRESSES[path] | {name: value})
        assert reply.status == 400 and f"'{name}'" in reply.error["message"], reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_minus_one_is_no_limit_and_zero_says_nothing(engine: FakeEngine, address: str, path: str) -> None:
    body = ADDRESSES[path] | {"max_tokens": -1}
    assert call(address, path, body).json["choices"][0]["finish_reason"] == "stop"
    assert engine.started[-1].request.max_tokens not in range(-1, 1000)
    assert call(address, path, body | {"max_tokens": -2}).error["param"] == "max_tokens"
    nothing = call(address, path, body | {"max_tokens": 0}).json
    choice = nothing["choices"][0]
    assert choice["finish_reason"] == "length" and nothing["usage"]["completion_tokens"] == 0
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == ""
    *chunks, last = chunks_of(call(address, path, body | {"max_tokens": 0, "stream": True}).text)
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("Hello" in str(chunk) for chunk in chunks)


def test_zero_says_nothing_under_max_completion_tokens_either(address: str) -> None:
    reply = call(address, "/v1/chat/completions", CHAT | {"max_completion_tokens": 0, "max_tokens": 5})
    assert reply.json["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_progress_of_the_prompt_as_llama_cpp_tells_it(address: str, path: str) -> None:
    body = ADDRESSES[path] | {"stream": True, "return_progress": True}
    chunks = chunks_of(call(address, path, body).text)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = told[0]["total"]
    assert [one["processed"] for one in told] == [0, 2, total] and all(one["cache"] == 0 for one in told)
    assert told[-1]["time_ms"] == pytest.approx(total)
    if path == "/v1/responses":
        assert {chunk["type"] for chunk in chunks if "prompt_progress" in chunk} == {"response.in_progress"}
    plain = call(address, path, ADDRESSES[path] | {"stream": True})
    assert "prompt_progress" not in plain.text
    whole = call(address, path, ADDRESSES[path] | {"return_progress": True})
    assert whole.status == 200 and "return_progress" in whole.headers[HEADER.lower()]


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "json_schema"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"regex": "[0-9]+"}, "regex"),
    ],
)
def test_forms_as_llama_cpp_and_sglang_send_them(engine: FakeEngine, address: str, sent: Any, kind: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert call(address, path, ADDRESSES[path] | sent).status == 200
        constraint = engine.started[-1].constraint
        assert constraint is not None
        assert constraint.legal(engine.tokenizer("4", add_special_tokens=False)["input_ids"]) == (kind == "regex")


def test_effort_as_openrouter_sends_it(address: str, engine: FakeEngine) -> None:
    from forerun.serve.chat_job import ThinkingWish
    from forerun.serve.routes.chat_request import ChatRequest

    def thinking(**body: Any) -> ThinkingWish:
        return ChatRequest.model_validate(CHAT | body).job().thinking

    assert thinking(reasoning={"effort": "low"}) == thinking(reasoning_effort="low") == ThinkingWish(True, 1024)
    assert thinking(reasoning={"max_tokens": 7}) == ThinkingWish(None, 7)
    assert thinking(reasoning={"enabled": False}) == thinking(reasoning={"effort": "none"}) == ThinkingWish(False)
    reply = call(address, "/v1/chat/completions", CHAT | {"reasoning": {"effort": "low", "exclude": True}})
    assert "reasoning.exclude" in reply.headers[HEADER.lower()]


def test_biases_as_a_list(engine: FakeEngine, address: str) -> None:
    call(address, "/v1/chat/completions", CHAT | {"logit_bias": [[5, 1.5], [6, False], [7, -2]]})
    assert dict(engine.started[-1].request.sampling.logit_bias) == {5: 1.5, 6: -100, 7: -2}
    assert call(address, "/v1/chat/completions", CHAT | {"logit_bias": []}).status == 200


def test_options_of_a_stream_say_nothing_where_there_is_none(address: str) -> None:
    reply = call(address, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert reply.status == 200 and reply.headers[HEADER.lower()] == "not used: stream_options"
    body = CHAT | {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert "include_obfuscation" in call(address, "/v1/chat/completions", body).headers[HEADER.lower()]
