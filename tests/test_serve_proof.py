"""`speculative: {"prove": true}` on every route: the answer is decoded again plainly and compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from engines import decoder
from local_engines import language_model
from serve_fakes import FakeEngine, app_for, call, live, until
from stream_rules import check_chat_stream, text_of
from test_proof import REPEATING, accept_all
from test_serve_streams import leave
from tiny import tiny_model

from forerun.engine import runner
from forerun.serve.app import create_app
from forerun.serve.engine_client import Work
from forerun.serve.errors import try_later
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

ASK = [{"role": "user", "content": REPEATING * 3}]
PROVE = {"draft": "lookup", "depth": 4, "prove": True}
BOOLEAN = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": BOOLEAN}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=900, pages=1500)
    model.stop_ids = frozenset({0, 2})
    local = LocalEngine(ServeSettings())
    local.open(model)
    yield local
    asyncio.run(local.close())


@pytest.fixture(scope="module")
def address(engine: LocalEngine) -> Iterator[str]:
    assert engine.model is not None
    settings = ServeSettings(tool_parser="hermes")
    service = ModelService("tiny", engine, loaded=loaded_model(engine.model, settings))
    with live(create_app(service, settings)) as address:
        yield address
        until(lambda: engine.state().running == 0)
        assert engine.state().cache_usage == 0, "every page is back"


def ask(address: str, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    reply = call(address, path, {"max_tokens": 24, "seed": 1, "speculative": PROVE, **body})
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {"40": 5}},
    "choices": {"n": 3},
    "stop": {"stop": ["e", " "], "max_tokens": 200},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": BOOLEAN}}, "n": 2},
    "tool": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60},
    "least": {"min_tokens": 20, "stop_token_ids": [40, 41, 42]},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "automatic": {"speculative": {"prove": True}},
    "plain": {"speculative": {"draft": "off", "prove": True}},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_a_chat_is_proved(address: str, fields: dict[str, Any]) -> None:
    fields = {"messages": ASK, **fields}
    answer = ask(address, **fields)
    proof = {"identical": True, "tokens": answer["usage"]["completion_tokens"]}
    assert answer["forerun"]["proof"] == proof and answer["forerun"]["accept"] == "coupled"
    plain = ask(address, **fields | {"speculative": fields.get("speculative", PROVE) | {"prove": False}})
    assert "proof" not in plain["forerun"]
    for one, other in zip(answer["choices"], plain["choices"], strict=True):
        for call_ in [*one["message"].get("tool_calls", ()), *other["message"].get("tool_calls", ())]:
            del call_["id"]
        assert one == other
    if fields.get("speculative", PROVE) is PROVE:  # who asks for a proof pays with time, not with figures
        for name in ("draft_n", "draft_n_accepted", "predicted_n"):
            assert answer["timings"][name] == plain["timings"][name]
        assert answer["forerun"]["rounds"] == plain["forerun"]["rounds"]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_ends_with_the_proof(address: str, usage: bool) -> None:
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 24, "n": 2, "speculative": PROVE, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    reply = call(address, "/v1/chat/completions", body)
    chunks = check_chat_stream(reply.text, choices=2, include_usage=usage, broken=True)
    proof = chunks[-1]["forerun"]["proof"]
    assert proof["identical"] is True and proof["tokens"] > 2
    assert not any("forerun" in chunk for chunk in chunks[:-1])


def test_texts_are_proved_with_their_own_log_probabilities(address: str) -> None:
    body = {"prompt": [REPEATING, "a b a b a"], "echo": True, "logprobs": 1, "n": 2}
    answer = ask(address, "/v1/completions", **body)
    assert answer["forerun"]["proof"] == {"identical": True, "tokens": answer["usage"]["completion_tokens"]}
    assert answer["choices"][0]["logprobs"]["token_logprobs"][1] is not None


def test_a_continued_message_is_proved(address: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "the one and"}]
    answer = ask(address, messages=messages, continue_final_message=True)
    assert answer["forerun"]["proof"]["identical"] is True


def test_the_other_dialects_have_it_too(address: str) -> None:
    message = call(address, "/v1/messages", {"messages": ASK, "max_tokens": 24, "model": "x", "speculative": PROVE})
    assert message.json["forerun"]["proof"] == {"identical": True, "tokens": message.json["usage"]["output_tokens"]}
    body = {"input": ASK[0]["content"], "max_output_tokens": 24, "speculative": PROVE}
    response = call(address, "/v1/responses", body).json
    assert response["forerun"]["proof"] == {"identical": True, "tokens": response["usage"]["output_tokens"]}
    for path, more in (
        ("/v1/messages", {"messages": ASK, "max_tokens": 24, "model": "x"}),
        ("/v1/responses", {"input": ASK[0]["content"], "max_output_tokens": 24}),
    ):
        streamed = call(address, path, {**more, "speculative": PROVE, "stream": True})
        data = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        found = [event for event in data if "proof" in json.dumps(event)]
        assert len(found) == 1 and '"identical": true' in json.dumps(found[0])


def test_a_wrong_token_is_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": REPEATING * 3, "max_tokens": 24, "temperature": 0, "logprobs": 0}
    plain = call(address, "/v1/completions", {**body, "speculative": "off"}).json["choices"][0]["logprobs"]["tokens"]
    monkeypatch.setattr(runner, "accept_coupled", accept_all)
    answer = ask(address, "/v1/completions", **body)
    wrong = answer["choices"][0]["logprobs"]["tokens"]
    index = next(i for i, (a, b) in enumerate(zip(wrong, plain, strict=True)) if a != b)
    proof = answer["forerun"]["proof"]
    assert (proof["identical"], proof["choice"], proof["index"], proof["tokens"]) == (False, 0, index, index)
    assert (proof["token"]["text"], proof["plain"]["text"]) == (wrong[index], plain[index])
    assert f"token {index} of choice 0 is {proof['token']['id']}" in proof["report"]
    assert ", tiny, " in proof["report"] and "seed 1, greedy" in proof["report"] and REPEATING not in proof["report"]


def test_an_engine_that_says_something_else_is_found_out() -> None:
    def say(work: Work) -> str:
        return "Hello there" if work.request.draft == "off" or work.request.sampling.choice == 0 else "Hello, there"

    engine = FakeEngine(say)
    with live(app_for(engine)) as address:
        proof = ask(address, messages=ASK, n=2)["forerun"]["proof"]
    assert (proof["choice"], proof["token"]["text"], proof["plain"]["text"]) == (1, ",", " the")
    assert engine.closed == len(engine.started) == 4


def test_an_answer_outlives_a_proof_that_cannot_be_had() -> None:
    engine = FakeEngine()
    start = engine.start

    async def refusing(work: Any) -> Any:
        if engine.started:
            raise try_later(429, "Too many answers are waiting already.", "queue_full")
        return await start(work)

    engine.start = refusing  # type: ignore[method-assign]
    with live(app_for(engine)) as address:
        answer = ask(address, messages=ASK)
    assert answer["choices"][0]["message"]["content"] == "Hello there, world."
    error = "Too many answers are waiting already."
    assert answer["forerun"]["proof"] == {"identical": None, "tokens": 0, "error": error}


class Second(FakeEngine):
    """Is at it when the second decoding of another engine has begun."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    @property
    def running(self) -> int:  # type: ignore[override]
        return len(self.engine.started) - 1


def test_who_leaves_during_the_proof_stops_it() -> None:
    engine = FakeEngine(lambda work: "word " * (200 if work.request.draft == "off" else 2), pause=0.01)
    with live(app_for(engine)) as address:
        body = {"messages": ASK, "stream": True, "stream_options": {"include_usage": True}, "speculative": PROVE}
        leave(address, body, "/v1/chat/completions", b"word", Second(engine))
        until(lambda: engine.running == 0)
        assert engine.closed == 2


@pytest.mark.parametrize(
    ("speculative", "said"),
    [
        ({"prove": True, "accept": "rejection"}, "nothing to 'prove'"),
        ({"prove": "yes"}, "speculative"),
        ({"accept": "always"}, "speculative"),
    ],
)
def test_what_cannot_be_is_refused(address: str, speculative: Any, said: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 5, "model": "x"}),
    ):
        reply = call(address, path, {**body, "speculative": speculative})
        assert reply.status == 400 and said in reply.text, reply.text


def test_the_text_of_a_proved_stream_is_whole(address: str) -> None:
    body = {"messages": ASK, "max_tokens": 24, "temperature": 0, "seed": 1}
    whole = ask(address, **body)["choices"][0]["message"]["content"]
    reply = call(address, "/v1/chat/completions", {**body, "stream": True, "speculative": PROVE})
    assert text_of(check_chat_stream(reply.text, broken=True)) == whole
