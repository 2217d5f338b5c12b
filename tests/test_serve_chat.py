"""Chat completions: every field by the official client, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_fakes import FakeEngine, app_for, call, live
from stream_rules import check_chat_stream, text_of

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TEXT = "Héllo there, 世界 and 🦊!"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say=lambda work: TEXT)


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with live(app_for(engine)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def streamed(address: str, choices: int = 1, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a request whose stream keeps all rules."""
    reply = call(address, "/v1/chat/completions", {"messages": MESSAGES, "stream": True, **body})
    assert reply.status == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    usage = bool(body.get("stream_options", {}).get("include_usage"))
    return check_chat_stream(reply.text, choices=choices, include_usage=usage)


def whole(address: str, **body: Any) -> dict[str, Any]:
    reply = call(address, "/v1/chat/completions", {"messages": MESSAGES, **body})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 5},
    {"max_completion_tokens": 5, "max_tokens": 9},
    {"temperature": 0.5, "top_p": 0.9, "seed": 7},
    {"n": 3},
    {"stop": "world"},
    {"stop": ["世", "zzz"]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3, "n": 2},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": -100, "6": 3.5}},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 0, "ignore_eos": True}},
    {"extra_body": {"stop_token_ids": [5], "include_stop_str_in_output": True}, "stop": "the"},
    {"extra_body": {"speculative": "off"}},
    {"extra_body": {"speculative": {"draft": "lookup", "depth": 2}}},
    {"extra_body": {"return_token_details": True}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_official_client_gets_the_same_whole_and_streamed(client: openai.OpenAI, fields: Any) -> None:
    create = client.chat.completions.create
    answer = create(model="tiny", messages=MESSAGES, **fields)
    chunks = list(
        create(model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert chunks[-1].usage == answer.usage
    assert len(answer.choices) == fields.get("n", 1)
    for choice in answer.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content or ()]
        assert entries == (choice.logprobs.content if choice.logprobs else [])


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("usage", [False, True])
def test_every_stream_keeps_the_rules(address: str, fields: dict[str, Any], usage: bool) -> None:
    plain = {**fields, **fields.get("extra_body", {})}
    plain.pop("extra_body", None)
    more = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = streamed(address, choices=plain.get("n", 1), **plain, **more)
    expected = whole(address, **plain)["choices"][0]["message"]["content"]
    assert text_of(chunks) == expected


def test_the_request_reaches_the_engine(address: str, engine: FakeEngine) -> None:
    whole(address, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-1, max_tokens=7, stop_token_ids=[9], n=2,
          logit_bias={"5": -100}, repetition_penalty=1.2, speculative={"draft": "lookup", "depth": 3},
          logprobs=True, top_logprobs=4)  # fmt: skip
    first, second = (work.request for work in engine.started[-2:])
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.seed, sampling.choice, second.sampling.choice) == (2**64 - 1, 0, 1)
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert sampling.repetition_penalty == 1.2
    assert (first.max_tokens, first.draft, first.draft_tokens, first.logprobs) == (7, "lookup", 3, 4)
    assert first.stop_ids == {0, 2, 9}
    whole(address, ignore_eos=True, speculative="off")
    request = engine.started[-1].request
    assert request.stop_ids == frozenset()
    assert request.draft == "off"
    assert request.sampling.temperature == 1.0, "OpenAI's default"
    assert request.max_tokens is None, "a chat that names no maximum has none"


def test_defaults_of_the_model_come_before_those_of_the_dialect() -> None:
    engine = FakeEngine()
    with live(app_for(engine, generation_defaults={"temperature": 0.6, "top_k": 20})) as address:
        whole(address)
        sampling = engine.started[-1].request.sampling
        assert (sampling.temperature, sampling.top_k) == (0.6, 20)
        whole(address, temperature=0)
        assert engine.started[-1].request.sampling.temperature == 0


def test_stops(address: str) -> None:
    answer = whole(address, stop=["there"])["choices"][0]
    assert answer["message"]["content"] == "Héllo "
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "there")
    kept = whole(address, stop=["there"], include_stop_str_in_output=True)["choices"][0]
    assert kept["message"]["content"] == "Héllo there"
    ended = whole(address)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None), "the model's own end"
    token = FakeEngine().tokenizer("é")["input_ids"][0]
    named = whole(address, stop_token_ids=[token])["choices"][0]
    assert (named["message"]["content"], named["stop_reason"]) == ("H", token)
    cut = whole(address, max_tokens=2)["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)


def test_logprobs_are_per_token_with_bytes_that_join_to_the_text(address: str) -> None:
    entries = whole(address, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == TEXT
    assert all(entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 2 for entry in entries)
    assert whole(address)["choices"][0]["logprobs"] is None
    assert whole(address, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_details_tell_where_each_token_came_from(address: str) -> None:
    details = whole(address, return_token_details=True)["choices"][0]["token_details"]
    assert {detail["source"] for detail in details} == {"lookup", "model"}
    assert [detail["round"] for detail in details] == sorted(detail["round"] for detail in details)
    chunks = streamed(address, return_token_details=True)
    assert [d for c in chunks for d in c["choices"][0].get("token_details", ())] == details


def test_usage_and_statistics(address: str) -> None:
    answer = whole(address, seed=5, n=2)
    tokens = len(FakeEngine().tokenizer(TEXT)["input_ids"])
    assert answer["usage"]["completion_tokens"] == 2 * tokens
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 2 * tokens
    speculative = answer["metrics"]["speculative_decoding"]
    assert speculative["num_draft_tokens"] == answer["timings"]["draft_n"] > 0
    assert speculative["num_accepted_draft_tokens"] == answer["timings"]["draft_n_accepted"]
    assert sum(speculative["acceptance_histogram"]) == speculative["num_spec_steps"]
    assert answer["timings"]["predicted_n"] == 2 * tokens
    assert (answer["forerun"]["seed"], answer["forerun"]["guaranteed"]) == (5, True)
    assert answer["forerun"]["tokens_per_round"] == pytest.approx(3.0)


def test_what_has_no_effect_is_named_in_a_header(address: str) -> None:
    body = {"messages": MESSAGES, "user": "x", "store": True}
    assert call(address, "/v1/chat/completions", body).headers["x-forerun-warning"] == "not used: user, store"
    described = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": {"type": "object"}}}
    reply = call(address, "/v1/chat/completions", {"messages": MESSAGES, "response_format": described})
    assert reply.headers["x-forerun-warning"] == "not used: response_format.json_schema.description"
    assert "x-forerun-warning" not in call(address, "/v1/chat/completions", {"messages": MESSAGES}).headers


def test_of_two_limits_the_newer_one_holds_and_the_other_is_named(address: str) -> None:
    for limits, header in (((5, 9), "not used: max_tokens"), ((5, 5), None)):
        body = {"messages": MESSAGES, "max_completion_tokens": limits[0], "max_tokens": limits[1]}
        reply = call(address, "/v1/chat/completions", body)
        assert reply.json["usage"]["completion_tokens"] == 5
        assert reply.headers.get("x-forerun-warning") == header


def test_what_is_continued_is_echoed_whatever_it_was(address: str) -> None:
    for said in ({"content": "Well, "}, {"refusal": "Well, "}, {"content": [{"type": "refusal", "refusal": "Well, "}]}):
        messages = [*MESSAGES, {"role": "assistant", **said}]
        body = {"messages": messages, "continue_final_message": True, "echo": True}
        assert whole(address, **body)["choices"][0]["message"]["content"] == f"Well, {TEXT}"


def test_monitors_may_ask_for_the_health_alone(address: str) -> None:
    asked = call(address, "/health", method="HEAD")
    assert asked.status == 200 and not asked.text


def test_request_ids_are_echoed_when_harmless(address: str) -> None:
    given = call(address, "/health", headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    for odd in ("a" * 200, "a b", "<script>", "\u00e9"):
        own = call(address, "/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert len(own) == 32


def test_a_model_has_several_names(address: str) -> None:
    for name in ("tiny", "org/tiny", None):
        assert whole(address, **({"model": name} if name else {}))["model"] == "tiny"
    reply = call(address, "/v1/chat/completions", {"messages": MESSAGES, "model": "gpt-4o"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
