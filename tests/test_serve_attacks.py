"""Requests made to hurt: few bytes that take long to read or check, forms that no answer has, odd hosts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serve_fakes import FakeEngine, app_for, call, live
from tiny import tiny_tokenizer

from forerun.errors import ForerunError
from forerun.sample.constraint import ConstraintStuck
from forerun.sample.grammar import GrammarVocabulary, compile_grammar
from forerun.serve.body_limit import CONTAINER, JsonSize
from forerun.serve.engine_room import client_error
from forerun.serve.errors import ApiError
from forerun.serve.routes import tokens

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(app_for(FakeEngine())) as address:
        yield address


def many(value: str, count: int) -> str:
    return ",".join([value] * count)


HUGE = {
    "lists": (CHAT, '{"messages":[%s]}'.replace("%s", many("[]", 2_000_000))),
    "messages": (CHAT, '{"messages":[%s]}'.replace("%s", many('{"role":"user","content":"x"}', 200_000))),
    "metadata": (CHAT, '{"messages":[],"metadata":{"a":[%s]}}'.replace("%s", many('"x"', 2_000_000))),
    "keys": (MESSAGES, '{"metadata":{%s}}'.replace("%s", ",".join(f'"{i}":1' for i in range(200_000)))),
    "ids": (TEXT, '{"prompt":[%s]}'.replace("%s", many("1", 3_000_000))),
    "no ids": (TEXT, '{"prompt":[%s]}'.replace("%s", many('"1"', 900_000))),
    "wrong parts": (CHAT, '{"messages":[%s]}'.replace("%s", many('{"role":"x","content":[{},{},{},{},{}]}', 9000))),
    "wrong blocks": (
        MESSAGES,
        '{"model":"tiny","max_tokens":1,"messages":[%s]}'.replace("%s", many('{"role":"x"}', 40_000)),
    ),
    "wrong items": (RESPONSES, '{"input":[%s]}'.replace("%s", many('{"type":"message","role":7}', 30_000))),
    "wrong tools": (RESPONSES, '{"input":"x","tools":[%s]}'.replace("%s", many('{"type":"function"}', 30_000))),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_million_values_do_not_stop_the_others(address: str, name: str) -> None:
    """They were read and checked on the event loop, for up to half a minute."""
    path, body = HUGE[name]
    begun = time.process_time()
    reply = call(address, path, body)
    assert 400 <= reply.status < 500 and "error" in reply.json
    assert time.process_time() - begun < 2.5, "client and server together"


def test_texts_full_of_brackets_are_no_values(address: str) -> None:
    reply = call(address, CHAT, {"messages": [{"role": "user", "content": '[{"a":1},' * 200_000}]})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"


def test_values_are_counted_however_the_body_is_cut() -> None:
    dice = random.Random(1)

    def text() -> str:
        return "".join(dice.choice('ab",[]{}:\\\né') for _ in range(dice.randrange(8)))

    def make(depth: int) -> Any:
        kind = dice.random() if depth < 5 else 0.0
        if kind < 0.5:
            return text() if kind < 0.4 else 1.5
        if kind < 0.75:
            return [make(depth + 1) for _ in range(dice.randrange(4))]
        return {f"{text()}{number}": make(depth + 1) for number in range(dice.randrange(4))}

    def size(value: Any) -> int:
        if isinstance(value, dict):
            return CONTAINER * (1 + len(value)) + max(0, len(value) - 1) + sum(map(size, value.values()))
        if isinstance(value, list):
            return CONTAINER + max(0, len(value) - 1) + sum(map(size, value))
        return 0

    for _ in range(500):
        value = make(0)
        body, counter, place = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode(), JsonSize(), 0
        while place < len(body):
            step = dice.randrange(1, 6)
            assert counter.add(body[place : place + step])
            place += step
        assert counter._counted == size(value), value


def test_only_utf_8(address: str) -> None:
    """Others would get past the count."""
    assert call(address, CHAT, json.dumps({"messages": ASK}).encode("utf-16")).status == 400


@pytest.mark.parametrize("field", ["reasoning_content", "arguments", "description"])
def test_all_that_reaches_the_template_counts(address: str, field: str) -> None:
    """A prompt is refused before it is tokenised: that takes long, on one of two threads."""
    text = "word " * 200_000
    turn: dict[str, Any] = {"role": "assistant", "content": "x"}
    if field == "reasoning_content":
        turn["reasoning_content"] = text
    elif field == "arguments":
        turn["tool_calls"] = [{"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": text})}}]
    else:
        tools = [{"type": "function", "function": {"name": f"f{n}", "description": text[:99_000]}} for n in range(9)]
        reply = call(address, CHAT, {"messages": ASK, "tools": tools})
        assert (reply.status, reply.error["param"]) == (400, "tools"), reply.text
        return
    reply = call(address, CHAT, {"messages": [*ASK, turn, *ASK]})
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded", reply.text


def test_many_ids_are_checked_at_once() -> None:
    """The tokenizer's length was asked for again with each of them, which took seconds."""

    class Counting:
        asked = 0

        def __len__(self) -> int:
            self.asked += 1
            return 290

    counting = Counting()
    tokens.check_ids([5] * 1000, counting)
    assert counting.asked == 1
    with pytest.raises(Exception, match="end at 289"):
        tokens.check_ids([290], counting)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("grammar", "start: start"),
        ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ],
)
def test_forms_that_nothing_has_are_refused_before_the_answer(kind: Any, value: Any) -> None:
    """They were the server's fault, in the middle of the answer."""
    with pytest.raises(ForerunError, match="nothing can match it"):
        compile_grammar(GrammarVocabulary(tiny_tokenizer(), 290, (2, 0)), kind, value)


def test_a_grammar_that_grows_too_large_on_the_way_is_its_senders_fault() -> None:
    """It was a 500."""

    class Stuck:
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "lexer error: too many expressions constructed\nat 0xdeadbeef"

    grammar = compile_grammar(GrammarVocabulary(tiny_tokenizer(), 290, (2, 0)), "regex", "a+")
    with pytest.raises(ConstraintStuck, match="too many expressions") as found:
        grammar.start(frozenset({2}))._check(Stuck())  # type: ignore[arg-type]
    error = client_error(found.value)
    assert isinstance(error, ApiError) and error.status == 400 and "0x" not in error.message


def test_thousands_of_choices() -> None:
    tokenizer = tiny_tokenizer()
    choices = [f"{'a' * (number % 14)}{number}" for number in range(4096)]
    grammar = compile_grammar(GrammarVocabulary(tokenizer, 290, (2, 0)), "choice", choices)
    constraint = grammar.start(frozenset({2}))
    for token in tokenizer(choices[4001], add_special_tokens=False)["input_ids"]:
        constraint.masks([])
        constraint.commit(token)
    assert constraint.forced(2) == [2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
        ({"speculative": {"draft": "off", "depth": 3}}, "speculative.depth"),
        ({"speculative": 99}, "speculative"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nosuch"}}, "structured_outputs.grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]}, "tools"),
    ],
)
def test_nothing_is_accepted_and_ignored(address: str, fields: dict[str, Any], param: str) -> None:
    reply = call(address, CHAT, {"messages": ASK, **fields})
    assert (reply.status, reply.error["param"]) == (400, param), reply.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_depth_alone(path: str) -> None:
    engine = FakeEngine()
    with live(app_for(engine)) as address:
        body: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": "Hi"}
        for wanted in (3, 0, False):
            assert call(address, path, body | {"speculative": wanted}).status == 200
    asked = [(work.request.draft, work.request.draft_tokens) for work in engine.started]
    assert asked == [("auto", 3), ("off", None), ("off", None)]


@pytest.mark.parametrize("host", ["127.0.0.1:80@evil.example", "[::1].evil.example", "[::1", "127.0.0.1:x", "[]"])
def test_hosts_that_only_begin_like_ours(address: str, host: str) -> None:
    assert call(address, "/health", headers={"Host": host}).status == 403


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", CHAT, TEXT, MESSAGES, RESPONSES])
def test_half_characters_are_refused_everywhere(address: str, path: str) -> None:
    """One route had a 500 for them."""
    lone = '"\\ud800"'
    fields = f'"content":{lone},"prompt":{lone},"input":{lone},"tokens":[{lone}]'
    bodies = [f"{{{part}}}" for part in fields.split(",")]
    bodies += [f'{{"model":"tiny","max_tokens":1,"messages":[{{"role":"user","content":{lone}}}]}}']
    for body in bodies:
        assert call(address, path, body).status == 400, body
