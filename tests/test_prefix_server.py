"""The prefix cache through the server: what is reported of it is exact to the token, in every dialect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import PAGE, decoder
from local_engines import language_model
from serve_fakes import call, live
from test_serve_thinking import TEMPLATE
from tiny import tiny_model, tiny_tokenizer

from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.metrics import Metrics
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
# The template drops earlier thoughts, as those of thinking models do.
DROPS = TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


@dataclass
class Served:
    """A server, and every sequence that its engine has had."""

    address: str
    local: LocalEngine
    engine: Engine
    seen: list[Sequence] = field(default_factory=list)

    def expected(self, sequence: Sequence) -> int:
        """Tokens of its prompt that earlier ones of the same salt have brought into the cache: full pages."""
        best = 0
        for other in self.seen[: self.seen.index(sequence)]:
            if other.request.cache_salt != sequence.request.cache_salt:
                continue
            kept = other.tokens if other.stop is not None else other.tokens[:-1]
            pairs = zip(kept, sequence.request.prompt[:-1], strict=False)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(kept), sequence.prompt_length - 1))
            best = max(best, same // PAGE * PAGE)
        return best

    def ask(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        reply = call(self.address, path, body, headers=headers or {})
        assert reply.status == 200, reply.text
        answer: dict[str, Any] = reply.json
        return answer


@pytest.fixture
def served(tmp_path: Any) -> Iterator[Served]:
    target = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1), quantize=False)
    model = language_model(target, context=1500, pages=1500)
    model.stop_ids = frozenset({0, 2})
    model.tokenizer = tiny_tokenizer()
    local = LocalEngine(ServeSettings())
    local.open(model)
    service = ModelService("tiny", local, loaded=loaded_model(model, ServeSettings()))
    metrics = Metrics(local.readings, "tiny", ("vllm", "forerun"))
    with live(create_app(service, ServeSettings(), metrics)) as address:
        found = Served(address, local, model.engine)
        usual = model.engine.submit

        def submit(*args: Any) -> Sequence:
            found.seen.append(usual(*args))
            return found.seen[-1]

        model.engine.submit = submit  # type: ignore[method-assign]
        yield found
    asyncio.run(local.close())
    model.engine.pool.check([])
    assert model.engine.pool.free == model.engine.pool.count


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = call(served.address, path, body).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_a_chat_that_grows_is_read_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "system", "content": "the rain in the north and the rain in the south of the land"}]
    hits = queries = 0
    for number in range(6):
        turns.append({"role": "user", "content": f"and the {number * 'other '}one?"})
        with caplog.at_level("INFO", "forerun.requests"):
            answer = served.ask(CHAT, messages=turns, max_tokens=20, temperature=0.8, seed=number)
        sequence, usage = served.seen[-1], answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == served.expected(sequence) == sequence.counters.cached
        assert number == 0 or usage["prompt_tokens"] - cached < 80
        assert answer["timings"]["cache_n"] == cached
        assert answer["timings"]["prompt_n"] + cached == usage["prompt_tokens"] == sequence.prompt_length
        line = caplog.records[-1]
        assert f"cached_tokens={cached} " in line.getMessage()
        hits, queries = hits + cached, queries + usage["prompt_tokens"]
        turns.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert hits > queries / 2
    metrics = call(served.address, "/metrics").text
    for prefix in ("vllm", "forerun"):
        for name, count in (("hits", hits), ("queries", queries)):
            found = re.search(rf"^{prefix}:prefix_cache_{name}_total{{[^}}]*}} ([0-9.e+]+)$", metrics, re.M)
            assert found and float(found[1]) == count


def test_every_dialect_says_what_was_cached(served: Served) -> None:
    text = "the cat and the dog and the cat and the dog and the cat " * 2
    for _ in range(2):
        answer = served.ask(COMPLETIONS, prompt=text, max_tokens=5)
    expected = served.expected(served.seen[-1])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == expected > 16
    asked = [{"role": "user", "content": text}]
    for _ in range(2):
        answer = served.ask(MESSAGES, messages=asked, max_tokens=5, model="tiny")
    expected, prompt = served.expected(served.seen[-1]), served.seen[-1].prompt_length
    assert answer["usage"]["cache_read_input_tokens"] == expected > 16
    assert answer["usage"]["input_tokens"] == prompt - expected and not answer["usage"]["cache_creation_input_tokens"]
    for _ in range(2):
        answer = served.ask(RESPONSES, input=text, max_output_tokens=5)
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == served.expected(served.seen[-1]) > 16
    body = {"messages": asked, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    last = events(served, CHAT, body)[-1]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == served.expected(served.seen[-1]) > 16


def test_choices_of_one_prompt_read_it_once_and_say_that_it_was_read(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "the cat and the dog and " * 8, "max_tokens": 5, "temperature": 1.0, "seed": 1}
    answer = served.ask(COMPLETIONS, n=3, **body)
    cached = [sequence.counters.cached for sequence in served.seen]
    full = (served.seen[0].prompt_length - 1) // PAGE * PAGE
    assert cached == [0, full, full]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = served.ask(COMPLETIONS, n=3, **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == full
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]


def test_progress_counts_what_was_cached(served: Served) -> None:
    text = "the rain and the sun " * 20
    for expected in (0, 1):
        body = {"prompt": text, "max_tokens": 2, "stream": True, "return_progress": True}
        told = [one["prompt_progress"] for one in events(served, COMPLETIONS, body) if "prompt_progress" in one]
        cached = served.seen[-1].counters.cached
        assert bool(cached) == bool(expected) and all(one["cache"] == cached for one in told)
        assert told[-1]["processed"] == told[-1]["total"] == served.seen[-1].prompt_length


def test_salts_and_keys_keep_callers_apart(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "the secret of the north is that the rain falls in the south", "max_tokens": 3}
    callers = [
        ({}, {}),
        ({"Authorization": "Bearer one"}, {}),
        ({"x-api-key": "other"}, {}),
        ({"Authorization": "Bearer one"}, {"cache_salt": "s"}),
        ({}, {"cache_salt": "s"}),
    ]
    for headers, salt in callers:
        found = [
            served.ask(COMPLETIONS, headers, **body, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert not found[0] and found[1] > 16
    same = served.ask(COMPLETIONS, {"x-api-key": "one"}, **body)  # another way to send the same key
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    for salt in ("", "x" * 1001, 3):
        assert call(served.address, COMPLETIONS, {**body, "cache_salt": salt}).status == 400


def test_a_proof_reads_everything_itself(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "the cat and the dog and the cat and the dog and the", "max_tokens": 8}
    served.ask(COMPLETIONS, **body)
    answer = served.ask(COMPLETIONS, speculative={"draft": "lookup", "prove": True}, **body)
    assert answer["forerun"]["proof"]["identical"] is True
    assert [sequence.counters.cached > 0 for sequence in served.seen] == [False, True, False]


def test_a_template_that_drops_thoughts_keeps_what_comes_before_them(served: Served) -> None:
    assert served.local.model is not None
    served.local.model.tokenizer.chat_template = DROPS
    turns: list[dict[str, Any]] = [{"role": "user", "content": "the cat and the dog and the cat and the dog"}]
    for number in range(4):
        answer = served.ask(CHAT, messages=turns, max_tokens=24, thinking_budget=6, seed=number, temperature=0.9)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == served.expected(served.seen[-1])
        before = served.seen[-2].prompt_length if number else 0
        assert cached >= before - 24  # all but the beginning of the thoughts, and less than a page
        message = answer["choices"][0]["message"]
        turns += [{"role": "assistant", "content": message["content"] or ""}, {"role": "user", "content": "and then"}]
