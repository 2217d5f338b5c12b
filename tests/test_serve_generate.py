"""Tokens in, tokens out: what plain decoding gives, whole and streamed, with log probabilities; ended by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from engines import decoder
from local_engines import language_model
from serve_fakes import call, live, until
from tiny import tiny_model

from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

PATH = "/inference/v1/generate"
IDS = [40, 50, 60, 70, 40, 50, 60, 70, 40, 50]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    target = decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=500, pages=500)
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


def generate(address: str, **params: Any) -> dict[str, Any]:
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 20, **params}, "request_id": "mine"}
    reply = call(address, PATH, body)
    assert reply.status == 200, reply.text
    found: dict[str, Any] = reply.json
    assert found["request_id"] == "mine" and found["output_mode"] == "tokens"
    return found


CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7, "n": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 1, "logit_bias": {"2": 5}, "max_tokens": 60},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:40])
def test_drafts_and_streams_change_no_token_and_no_log_probability(address: str, case: dict[str, Any]) -> None:
    params = {"max_tokens": 20, "logprobs": 2} | case
    plain = generate(address, speculative="off", **params)
    drafted = generate(address, speculative={"draft": "lookup", "depth": 4}, **params)
    assert drafted["choices"] == plain["choices"]
    body = {"token_ids": IDS, "sampling_params": params, "stream": True, "stream_options": {"include_usage": True}}
    lines = call(address, PATH, body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    found, plainly = (usage.pop("prompt_tokens_details") for usage in (chunks[-1]["usage"], plain["usage"]))
    assert chunks[-1]["usage"] == plain["usage"]
    assert found["cached_tokens"] >= plainly["cached_tokens"]
    for choice in plain["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert all(entry["token"] == f"token_id:{entry['token_id']}" for entry in entries)
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_log_probabilities_are_those_of_one_pass(address: str, engine: LocalEngine) -> None:
    """The end token's too, which is the last of the tokens: what a trainer computes of the same text."""
    found = generate(address, temperature=1.0, seed=3, logit_bias={"2": 4}, max_tokens=100, logprobs=0)["choices"][0]
    assert found["finish_reason"] == "stop" and found["token_ids"][-1] == 2
    rated = call(address, PATH, {"token_ids": [*IDS, *found["token_ids"]], "sampling_params": {
        "max_tokens": 1, "prompt_logprobs": 0}}).json["prompt_logprobs"]  # fmt: skip
    assert rated[0] is None
    answer = rated[len(IDS) :]
    assert [list(entry) for entry in answer] == [[str(token)] for token in found["token_ids"]]
    values = torch.tensor([entry["logprob"] for entry in found["logprobs"]["content"]])
    assert torch.allclose(values, torch.tensor([next(iter(entry.values()))["logprob"] for entry in answer]), atol=1e-5)


def test_text_mode_and_stops(address: str) -> None:
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "ignore_eos": True}
    body = {"token_ids": IDS, "sampling_params": params}
    whole = call(address, PATH, body | {"output_mode": "text"}).json
    choice = whole["choices"][0]
    assert whole["output_mode"] == "text" and choice["text"]
    assert "text" not in call(address, PATH, body).json["choices"][0]
    decoded = call(address, "/detokenize", {"tokens": choice["token_ids"]}).json["content"]
    assert decoded == choice["text"]
    ended = generate(address, **params | {"stop_token_ids": [choice["token_ids"][4]]})["choices"][0]
    assert ended["token_ids"] == choice["token_ids"][: choice["token_ids"].index(choice["token_ids"][4]) + 1]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", choice["token_ids"][4])
    regex = generate(address, structured_outputs={"regex": "[ab]{3}"})["choices"][0]["token_ids"]
    assert len(call(address, "/detokenize", {"tokens": [t for t in regex if t not in (0, 2)]}).json["content"]) == 3


def test_answers_are_ended_by_name(address: str, engine: LocalEngine) -> None:
    body = {"token_ids": IDS, "request_id": "long", "sampling_params": {
        "max_tokens": 480, "ignore_eos": True, "n": 2, "seed": 5, "temperature": 1.0}}  # fmt: skip
    whole = call(address, PATH, body).json["choices"]
    assert engine._thread is not None
    with ThreadPoolExecutor(2) as threads:
        gate = engine._thread.call(lambda: None)
        gate.result()
        asked = [threads.submit(partial(call, address, PATH, body | {"stream": stream})) for stream in (False, True)]
        until(lambda: engine.state().running + engine.state().waiting >= 4)
        assert call(address, "/abort_requests", {"request_ids": ["long", "unknown"]}).status == 200
        cut, stream = (one.result() for one in asked)
    for choice, full in zip(cut.json["choices"], whole, strict=True):
        assert choice["finish_reason"] in ("abort", "length")  # a quick machine may have been there before
        assert choice["token_ids"] == full["token_ids"][: len(choice["token_ids"])]
    assert stream.text.endswith("data: [DONE]\n\n")
    until(lambda: engine.state().running == engine.state().waiting == 0)


@pytest.mark.parametrize(
    ("body", "status", "about"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [100_000]}, 400, "token"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"best_of": 2}}, 400, "best_of"),
        ({"token_ids": [5], "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ({"token_ids": [5], "stream": True, "sampling_params": {"prompt_logprobs": 1}}, 400, "prompt_logprobs"),
        ({"token_ids": [5] * 600}, 400, "The prompt has 600"),
        ({"token_ids": [5], "model": "another"}, 404, "another"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_is_refused(address: str, body: dict[str, Any], status: int, about: str) -> None:
    reply = call(address, PATH, body)
    assert reply.status == status and about in reply.text


def test_requests_are_rendered_into_tokens(address: str) -> None:
    """What comes back can be sent as it is, and gives the same answer."""
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_completion_tokens": 9,
        "model": "tiny",
    }
    made = call(address, "/v1/chat/completions/render", chat).json
    said = call(address, "/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
    assert made["sampling_params"]["max_tokens"] == 9 and made["model"] == "tiny"
    assert call(address, PATH, made | {"output_mode": "text"}).json["choices"][0]["text"] == said
    text = {"prompt": [[40, 41], [5, 6]], "seed": 4, "max_tokens": 7, "guided_regex": "[ab]{3}"}
    several = call(address, "/v1/completions/render", text).json
    assert [one["token_ids"] for one in several] == [[40, 41], [5, 6]]
    answers = [call(address, PATH, one | {"output_mode": "text"}).json["choices"][0]["text"] for one in several]
    whole = call(address, "/v1/completions", text).json["choices"]
    assert answers == [choice["text"] for choice in whole] and len(answers[0]) == 3
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = {"messages": [{"role": "user", "content": [picture]}]}
    assert call(address, "/v1/chat/completions/render", seen).status == 400
