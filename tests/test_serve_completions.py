"""Text completions: every form of prompt, echo, the older lists of log probabilities, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_fakes import FakeEngine, app_for, call, live
from stream_rules import check_text_stream


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say=lambda work: f" and {len(work.request.prompt)} more")


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with live(app_for(engine)) as address:
        yield address


def complete(address: str, **body: Any) -> dict[str, Any]:
    reply = call(address, "/v1/completions", body)
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


FIELDS: list[dict[str, Any]] = [
    {"prompt": "Hello"},
    {"prompt": ["Hello", "the end"], "n": 2},
    {"prompt": [40, 41, 42]},
    {"prompt": [[40, 41], [42]], "logprobs": 2},
    {"prompt": "Hello", "echo": True},
    {"prompt": "Hello", "logprobs": 0, "max_tokens": 3},
    {"prompt": ["Hello", "You"], "echo": True, "logprobs": 1, "n": 2},
    {"prompt": "Hello", "stop": ["more"], "seed": 3, "temperature": 0.5},
    {"prompt": "Hello", "extra_body": {"return_token_details": True, "top_k": 3}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_the_official_client_gets_the_same_whole_and_streamed(address: str, fields: Any) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny", **fields)
    usage: Any = {"include_usage": True}
    chunks = list(client.completions.create(model="tiny", stream=True, stream_options=usage, **fields))
    assert chunks[-1].usage == answer.usage
    prompts = fields["prompt"] if isinstance(fields["prompt"], list) else [fields["prompt"]]
    several = 1 if isinstance(prompts[0], int) else len(prompts)
    assert len(answer.choices) == several * fields.get("n", 1)
    for choice in answer.choices:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [entry for part in mine if part.logprobs for entry in getattr(part.logprobs, name)]
            assert parts == (getattr(choice.logprobs, name) if choice.logprobs else [])


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("fields", FIELDS[:-1], ids=str)
def test_every_stream_keeps_the_rules(address: str, fields: dict[str, Any], usage: bool) -> None:
    count = len(complete(address, **fields)["choices"])
    options = {"stream_options": {"include_usage": True}} if usage else {}
    reply = call(address, "/v1/completions", {**fields, "stream": True, **options})
    check_text_stream(reply.text, choices=count, include_usage=usage)


def test_choices_come_in_the_order_of_the_prompts(address: str) -> None:
    choices = complete(address, prompt=["a", "ab", "abc"], n=2)["choices"]
    assert [choice["text"] for choice in choices] == [f" and {n} more" for n in (1, 1, 2, 2, 3, 3)]
    assert [choice["index"] for choice in choices] == list(range(6))


def test_usage_and_timings_count_every_prompt_once(address: str) -> None:
    answer = complete(address, prompt=["a", "ab", "abc"], n=2)
    assert answer["usage"]["prompt_tokens"] == answer["timings"]["prompt_n"] == 1 + 2 + 3


def test_a_text_is_rated_as_lm_eval_does(address: str) -> None:
    """echo with logprobs; max_tokens 1 adds a token at the end, 0 adds none."""
    prompt = [40, 41, 42, 43]
    for limit in (0, 1):
        answer = complete(address, prompt=prompt, echo=True, logprobs=1, max_tokens=limit, temperature=0, seed=1)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + limit
        assert logprobs["token_logprobs"][:4] == [None, -1.0, -1.0, -1.0]
        assert logprobs["top_logprobs"][0] is None
        assert max(logprobs["top_logprobs"][1].values()) == -0.5
        assert logprobs["text_offset"][:3] == [0, 1, 2]
        assert answer["usage"]["completion_tokens"] == limit
    rated = complete(address, prompt="Hello", echo=True, max_tokens=0)
    assert rated["choices"][0]["text"] == "Hello"


def test_offsets_are_places_in_the_text(address: str, engine: FakeEngine) -> None:
    """Several tokens may share a character: they begin where it does."""
    prompt = "Hé 🦊!"
    choice = complete(address, prompt=prompt, echo=True, logprobs=0, max_tokens=3)["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], engine.tokenizer(prompt)["input_ids"]
    assert offsets[:8] == [0, 1, 1, 2, 3, 3, 3, 3]
    for text, offset in list(zip(choice["logprobs"]["tokens"], offsets, strict=True))[len(tokens) - 1 :]:
        assert choice["text"][offset:].startswith(text)


def test_no_log_probabilities_of_the_prompt_unless_asked_for(address: str, engine: FakeEngine) -> None:
    for fields, asked in (({"echo": True}, False), ({"logprobs": 1}, False), ({"echo": True, "logprobs": 1}, True)):
        complete(address, prompt="Hello", **fields)
        assert engine.started[-1].request.prompt_logprobs is asked


def test_the_best_n_of_n_are_all_of_them(address: str) -> None:
    assert len(complete(address, prompt="Hello", n=2, best_of=2)["choices"]) == 2
    assert len(complete(address, prompt="Hello", best_of=1)["choices"]) == 1


def test_sixteen_tokens_unless_told_otherwise(address: str, engine: FakeEngine) -> None:
    complete(address, prompt="Hello")
    assert engine.started[-1].request.max_tokens == 16


def test_a_raw_prompt_may_hold_control_tokens(address: str, engine: FakeEngine) -> None:
    complete(address, prompt="<|im_start|>user")
    assert engine.started[-1].request.prompt[0] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [290]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"prompt": "x" * 200_000}, "prompt"),
        ({"prompt": "x", "messages": []}, "messages"),
        ({"prompt": "x", "suffix": "y", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_with_the_parameter(address: str, body: dict[str, Any], param: str) -> None:
    reply = call(address, "/v1/completions", body)
    assert reply.status == 400, reply.text
    assert reply.error["param"] == param, reply.text
