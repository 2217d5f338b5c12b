"""The server on a real engine with a tiny model: same answers streamed or not, drafted or not, alone or in a storm."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jsonschema
import openai
import pytest
from engines import PAGE, decoder
from local_engines import language_model
from serve_fakes import call, live, until
from stream_rules import check_chat_stream, check_text_stream, text_of
from test_serve_streams import leave
from tiny import tiny_model

from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

ASK: Any = [{"role": "user", "content": "the cat and the dog and the cat and the dog and"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=1500, pages=1500)
    model.stop_ids = frozenset({0, 2})
    local = LocalEngine(ServeSettings())
    local.open(model)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def address(engine: LocalEngine) -> Iterator[str]:
    assert engine.model is not None
    service = ModelService("tiny", engine, loaded=loaded_model(engine.model, ServeSettings()))
    with live(create_app(service, ServeSettings())) as address:
        yield address
        until(lambda: engine.state().running == 0)
        assert engine.state().cache_usage == 0, "every page is back"


def test_the_servers_own_sampling_defaults_come_before_the_models(engine: LocalEngine) -> None:
    assert engine.model is not None
    model = replace(engine.model, generation_defaults={"temperature": 0.2, "top_p": 0.9})
    loaded = loaded_model(model, ServeSettings(default_top_p=0.5, default_top_k=0))
    assert loaded.generation_defaults == {"temperature": 0.2, "top_p": 0.5, "top_k": 0}


def chat(address: str, **body: Any) -> dict[str, Any]:
    reply = call(address, "/v1/chat/completions", {"messages": ASK, "max_tokens": 24, **body})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


def said(answer: dict[str, Any]) -> Any:
    """All that may not depend on who drafts, who else is served, what was asked before, or how it is sent."""
    return [(c["message"], c["logprobs"], c["finish_reason"]) for c in answer["choices"]], used(answer["usage"])


def used(usage: dict[str, Any]) -> dict[str, Any]:
    """All but what the cache had."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0.9, "seed": 7, "n": 3, "logprobs": True},
    {"temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.7, "seed": 9, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {"40": 5, "41": -100}, "max_tokens": 60},
    {"temperature": 0, "stop": ["e"], "seed": 1},
    {"temperature": 1, "seed": 3, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
                   "required": ["a", "b"], "additionalProperties": False}}}},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:60])
def test_drafts_and_streams_change_nothing(address: str, case: dict[str, Any]) -> None:
    plain = chat(address, speculative="off", **case)
    drafted = chat(address, speculative={"draft": "lookup", "depth": 4}, **case)
    assert said(drafted) == said(plain)
    assert said(chat(address, **case)) == said(plain)
    body = {"messages": ASK, "max_tokens": 24, "stream": True, "stream_options": {"include_usage": True}, **case}
    reply = call(address, "/v1/chat/completions", body)
    chunks = check_chat_stream(reply.text, choices=case.get("n", 1), include_usage=True, broken=True)
    assert used(chunks[-1]["usage"]) == used(plain["usage"])
    for choice in plain["choices"]:
        assert text_of(chunks, choice=choice["index"]) == choice["message"]["content"]
        parts = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == (choice["logprobs"] or {"content": []})["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_drafts_were_made(address: str) -> None:
    body = {
        "max_tokens": 60,
        "temperature": 0,
        "logit_bias": {"40": 30},
        "speculative": {"draft": "lookup", "depth": 4},
    }
    answer = chat(address, **body)
    assert answer["timings"]["draft_n"] > 0
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert answer["forerun"]["draft"] == "lookup"
    assert chat(address, **body | {"speculative": "off"})["timings"]["draft_n"] == 0


def test_forms_of_answers(address: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    json_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in range(5):
        more = {"seed": seed, "max_tokens": 60}
        for fields in ({"response_format": json_format}, {"structured_outputs": {"json": schema}}):
            jsonschema.validate(json.loads(chat(address, **fields, **more)["choices"][0]["message"]["content"]), schema)
        for fields in ({"structured_outputs": {"choice": ["red", "blue"]}}, {"guided_choice": ["red", "blue"]}):
            assert chat(address, **fields, **more)["choices"][0]["message"]["content"] in ("red", "blue")
        text = chat(address, structured_outputs={"regex": "[ab]{3}-[0-9]{2}"}, **more)["choices"][0]["message"][
            "content"
        ]
        assert re.fullmatch("[ab]{3}-[0-9]{2}", text)
        text = chat(address, guided_grammar='start: "yes" | "no"', **more)["choices"][0]["message"]["content"]
        assert text in ("yes", "no")
    body = {"prompt": "the", "max_tokens": 30, "structured_outputs": {"choice": ["one", "two"]}}
    assert call(address, "/v1/completions", body).json["choices"][0]["text"] in ("one", "two")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"regex": "(((("}},
        {"structured_outputs": {"regex": "x" * 100_000}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"json": {"items": {"items": {}}} | {"a": "b" * 100_000}}},
        {"ignore_eos": True, "guided_choice": ["a"]},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_forms_that_cannot_be_are_refused(address: str, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        reply = call(address, "/v1/chat/completions", {"messages": ASK, "max_tokens": 5, "stream": stream, **fields})
        assert reply.status == 400, reply.text
        assert len(reply.error["message"]) < 1000


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", a={"type": "integer", "minimum": 0, "maximum": 9}), tool("say", word={"enum": ["hi", "bye"]})]


@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"add", "say"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "say"}}, "parallel_tool_calls": False}, {"say"}, 1),
        ({"tool_choice": "add", "parallel_tool_calls": False}, {"add"}, 1),
        ({"tool_choice": "required"}, {"add", "say"}, 50),
    ],
    ids=lambda value: (str(sorted(value)) if isinstance(value, set) else str(value))[:50],
)
def test_tools_that_must_be_called_are_called(address: str, fields: Any, names: set[str], most: int) -> None:
    for seed in range(3):
        answer = chat(address, tools=TOOLS, seed=seed, max_tokens=200, **fields)["choices"][0]
        calls = [call["function"] for call in answer["message"].get("tool_calls", ())]
        if answer["finish_reason"] == "length":
            assert most > 1, "one call is short"
            calls = calls[:-1]
        else:
            assert answer["finish_reason"] == "tool_calls"
            assert not (answer["message"]["content"] or "").strip()
        assert len(calls) <= most
        for made in calls:
            assert made["name"] in names
            schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == made["name"])
            jsonschema.validate(json.loads(made["arguments"]), schema)


def test_with_tools_at_hand_an_answer_is_a_call_or_has_its_form(address: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    more = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200, "response_format": form}
    for seed in range(4):
        message = chat(address, seed=seed, temperature=1, **more)["choices"][0]["message"]
        if "tool_calls" not in message:
            jsonschema.validate(json.loads(message["content"]), schema)
    brace = call(address, "/tokenize", {"content": "{"}).json["tokens"][0]
    forced = chat(address, logit_bias={str(brace): 100}, **more)["choices"][0]["message"]
    jsonschema.validate(json.loads(forced["content"]), schema)
    angle = call(address, "/tokenize", {"content": "<"}).json["tokens"][0]
    called = chat(address, logit_bias={str(angle): 100}, **more)["choices"][0]["message"]
    assert len(called["tool_calls"]) == 1


def test_a_least_number_of_tokens(address: str) -> None:
    """The end is by far the likeliest token, and may not come."""
    fields = {"logit_bias": {"2": 100}, "temperature": 0, "max_tokens": 40}
    assert chat(address, **fields)["usage"]["completion_tokens"] == 0
    assert chat(address, min_tokens=9, **fields)["usage"]["completion_tokens"] == 9
    body = {"prompt": "the", "min_tokens": 7, **fields}
    assert call(address, "/v1/completions", body).json["usage"]["completion_tokens"] == 7


def test_a_form_that_is_complete_ends_before_the_least_number_of_tokens(address: str) -> None:
    """Nothing else may come. Where the form lets it go on, it goes on; a stop string ends it in any case."""
    for drafts in ("off", {"draft": "lookup", "depth": 4}):
        fields = {"min_tokens": 9, "max_tokens": 40, "temperature": 0, "speculative": drafts}
        whole = chat(address, guided_choice=["cat", "dog"], **fields)
        assert whole["choices"][0]["message"]["content"] in ("cat", "dog")
        assert whole["choices"][0]["finish_reason"] == "stop" and whole["usage"]["completion_tokens"] < 9
        ends = {"logit_bias": {"2": 100}, **fields}  # as soon as it may
        longer = chat(address, guided_regex="[a-z ]+", **ends)
        assert longer["choices"][0]["finish_reason"] == "stop" and longer["usage"]["completion_tokens"] == 9
        first = longer["choices"][0]["message"]["content"][0]
        stopped = chat(address, guided_regex="[a-z ]+", stop=[first], **ends)
        assert stopped["choices"][0]["message"]["content"] == "" and stopped["usage"]["completion_tokens"] < 9


def test_a_text_is_rated_as_it_would_be_generated(address: str) -> None:
    """lm-eval's way. Log probabilities are the raw model's: a bias that forces a token does not change them."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    text = [40, 50, 60, 70, 80, 90, 100, 110, 42, 43]
    create = partial(client.completions.create, model="tiny", temperature=0, logprobs=2)
    rated = [create(prompt=text, max_tokens=limit, echo=True).choices[0].logprobs for limit in (0, 1)]
    assert rated[0] is not None
    assert rated[1] is not None
    found = rated[0].token_logprobs
    assert found is not None
    assert (len(found), found[0]) == (len(text), None)
    assert (rated[1].token_logprobs or [])[:-1] == found
    for place in (1, 4, 9):
        bias: Any = {str(text[place]): 100}
        forced = create(prompt=text[:place], max_tokens=1, logit_bias=bias).choices[0].logprobs
        assert forced is not None
        assert forced.token_logprobs == pytest.approx([found[place]], abs=1e-5)
    streamed = {"prompt": text, "max_tokens": 8, "echo": True, "logprobs": 2, "temperature": 0, "stream": True}
    chunks = check_text_stream(call(address, "/v1/completions", streamed).text)
    assert chunks[0]["choices"][0]["logprobs"]["token_logprobs"] == found


def test_a_storm_of_mixed_requests_gets_what_each_gets_alone(address: str) -> None:
    def body(number: int) -> tuple[str, dict[str, Any]]:
        text = "the cat and the dog " * (1 + number % 4) + str(number)
        more = {
            "max_tokens": 8 + number % 12,
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "speculative": ("off", "auto", "lookup")[number % 3],
            "logprobs": True if number % 4 else None,
            "n": 1 + number % 2,
        }
        if number % 5 == 0:
            return "/v1/completions", {"prompt": text, **more, "logprobs": 2}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}

    def ask(number: int) -> Any:
        path, sent = body(number)
        answer = call(address, path, sent).json
        return answer["choices"], used(answer["usage"])

    numbers = list(range(24))
    alone = [ask(number) for number in numbers]
    random.Random(0).shuffle(numbers)
    with ThreadPoolExecutor(len(numbers)) as threads:
        together = dict(zip(numbers, threads.map(ask, numbers), strict=True))
    assert [together[number] for number in range(24)] == alone


def test_clients_that_leave_at_any_moment_leave_nothing_behind(address: str, engine: LocalEngine) -> None:
    def go(number: int) -> None:
        body = {"messages": ASK, "max_tokens": 300, "ignore_eos": True, "stream": number % 2 == 0, "n": 1 + number % 2}
        leave(address, body, "/v1/chat/completions", b"data" if number % 4 == 0 else b"", Always())  # type: ignore[arg-type]

    class Always:
        running = 1

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(go, range(40)))
    until(lambda: engine.state().running == engine.state().waiting == 0)
    until(lambda: engine.state().cache_usage == 0)
    assert chat(address, temperature=0)["choices"][0]["finish_reason"] in ("stop", "length")


LARGE = 100_000  # a maximum that no context has room for


def without_a_maximum(number: int) -> tuple[str, dict[str, Any]]:
    """A request that may go on as long as there is room, in each of the ways to ask for that."""
    text = "the cat and the dog " * (1 + number % 3) + str(number)
    messages = [{"role": "user", "content": text}]
    ways: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": text}),
        ("/v1/chat/completions", {"messages": messages, "max_completion_tokens": LARGE}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": LARGE}),
        ("/v1/completions", {"prompt": text, "max_tokens": LARGE}),
    ]
    path, body = ways[number % len(ways)]
    return path, {**body, "temperature": 0}


def test_forty_answers_without_a_maximum_in_a_cache_smaller_than_the_context(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is refused, none waits for ever, and each says what it says alone; the last page ends the longest."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 16)
    assert engine.model is not None
    model = language_model(engine.model.engine.model, context=1500, pages=24)
    model.stop_ids = frozenset({0, 2})
    local, room = LocalEngine(ServeSettings()), 24 * PAGE
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, ServeSettings()))

    def ask(number: int) -> Any:
        reply = call(address, *without_a_maximum(number))
        assert reply.status == 200, reply.text
        usage = reply.json["usage"]
        used = sum(
            usage.get(name, 0)
            for name in (
                *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
                "cache_read_input_tokens",  # Anthropic's clients add them up
            )
        )
        return used, reply.json.get("choices") or reply.json.get("content") or [
            item["content"] for item in reply.json["output"]
        ]

    with live(create_app(service, ServeSettings())) as address:
        alone = [ask(number) for number in range(40)]
        with ThreadPoolExecutor(40) as threads:
            together = list(threads.map(ask, range(40)))
        assert together == alone
        assert max(used for used, _ in alone) == room + 1, "the last token needs no place"
        assert model.engine.scheduler.preemptions > 0
        props = call(address, "/props").json
        assert (props["context"], props["cache_tokens"]) == (room, room)
        reply = call(address, "/v1/completions", {"prompt": [5] * room, "max_tokens": 1})
        assert reply.status == 400 and f"maximum context length is {room} tokens" in reply.json["error"]["message"]
        until(lambda: local.state().cache_usage == 0)
    asyncio.run(local.close())
