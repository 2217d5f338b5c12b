"""Thinking and tool calls through the whole server: what goes to the template and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serve_fakes import FakeEngine, app_for, call, live
from stream_rules import check_chat_stream, text_of

ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
CALLS = (
    "<think>I look it up.</think>\n\nOne moment."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Rome, \\"Italy\\""}}\n</tool_call>'
)
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    engine = FakeEngine(say=lambda work: CALLS)
    engine.tokenizer.chat_template = TEMPLATE
    return engine


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with live(app_for(engine)) as address:
        yield address


def prompt_of(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.started[-1].request.prompt))


@pytest.mark.parametrize("per_round", [1, 2, 3, 7, 1000])
def test_calls_and_thinking_whole_and_streamed(engine: FakeEngine, address: str, per_round: int) -> None:
    engine.per_round = per_round
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    message = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0].message
    assert message.content == "One moment."
    assert message.reasoning_content == message.reasoning == "I look it up."  # type: ignore[attr-defined]
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
    assert calls == [("weather", {"city": "Paris"}), ("time", {"city": 'Rome, "Italy"'})]
    assert len({c.id for c in message.tool_calls or ()}) == 2

    body = {"messages": ASK, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    chunks = check_chat_stream(call(address, "/v1/chat/completions", body).text, include_usage=True)
    assert text_of(chunks) == "One moment."
    assert text_of(chunks, "reasoning") == text_of(chunks, "reasoning_content") == "I look it up."
    found: list[list[str]] = []
    for part in (p for chunk in chunks for c in chunk["choices"] for p in c["delta"].get("tool_calls", ())):
        if "id" in part:
            found.append([part["function"]["name"], ""])
        found[part["index"]][1] += part["function"]["arguments"]
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    usage = chunks[-1]["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_reasoning_tokens_do_not_depend_on_the_rounds(engine: FakeEngine, address: str) -> None:
    counts = set()
    for per_round in (1, 2, 5, 100):
        engine.per_round = per_round
        usage = call(address, "/v1/chat/completions", {"messages": ASK, "tools": TOOLS}).json["usage"]
        counts.add(usage["completion_tokens_details"]["reasoning_tokens"])
    assert len(counts) == 1


def test_without_tools_a_call_is_text(address: str) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = call(address, "/v1/chat/completions", {"messages": ASK, **more}).json["choices"][0]
        assert "<tool_call>" in choice["message"]["content"]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_a_call_that_a_stop_string_cut_is_no_call_to_make(address: str) -> None:
    """Whoever ran it would run it with half of its arguments. A call that was whole by then is one."""
    stops = {"aris": True, "}}\n": True, "</tool_call>": False, "Rome": True, '"name": "time': False}
    for stop, cut in stops.items():
        body = {"messages": ASK, "tools": TOOLS, "stop": stop}
        choice = call(address, "/v1/chat/completions", body).json["choices"][0]
        assert choice["stop_reason"] == stop
        assert choice["finish_reason"] == ("stop" if cut else "tool_calls"), stop
        tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
        asked = {"model": "tiny", "max_tokens": 2000, "messages": ASK, "tools": tools, "stop_sequences": [stop]}
        message = call(address, "/v1/messages", asked).json
        expected = ("stop_sequence", stop) if cut else ("tool_use", None)
        assert (message["stop_reason"], message["stop_sequence"]) == expected


@pytest.mark.parametrize("most", [1, 9, 30, 60])
def test_a_call_that_the_limit_cut_is_never_text(most: int) -> None:
    """In no dialect, neither whole nor streamed."""
    say = CALLS.partition("One moment.")[2]
    with live(app_for(FakeEngine(say=lambda work: say))) as address:
        chat = {"messages": ASK, "tools": TOOLS, "max_tokens": most}
        choice = call(address, "/v1/chat/completions", chat).json["choices"][0]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]
        streamed = call(address, "/v1/chat/completions", chat | {"stream": True}).text
        assert '"finish_reason":"length"' in streamed and "<" not in streamed
        functions = [tool["function"] for tool in TOOLS]
        tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
        message = call(address, "/v1/messages", chat | {"model": "tiny", "tools": tools}).json
        assert message["stop_reason"] == "max_tokens" and "text" not in [part["type"] for part in message["content"]]
        body = {"input": "x", "tools": [{"type": "function"} | one for one in functions], "max_output_tokens": most}
        response = call(address, "/v1/responses", body).json
        assert response["status"] == "incomplete" and "message" not in [item["type"] for item in response["output"]]


def test_the_template_sees_tools_calls_results_and_reasoning(engine: FakeEngine, address: str) -> None:
    for name in ("reasoning_content", "reasoning"):
        messages = [
            *ASK,
            {
                "role": "assistant",
                "content": None,
                name: "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
        ]
        reply = call(address, "/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert reply.status == 200, reply.text
        prompt = prompt_of(engine)
        assert "Look it up" in prompt
        assert "<think>hm</think>" in prompt
        assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
        assert "sun" in prompt


def test_calls_come_back_as_the_model_wrote_them(engine: FakeEngine, address: str) -> None:
    """With a name that no tool has, or cut off by a length limit: a client that sends them back must not be stuck."""
    for name, arguments, shown in (
        ("look up!", '{"city": "Paris"}', '{"name": "look up!", "arguments": {"city": "Paris"}}'),
        (
            "weather",
            '{"days": [1, 2], "city": "Par',
            '{"name": "weather", "arguments": {"days": [1, 2], "city": "Par"}}',
        ),
        ("weather", '{"city', '{"name": "weather", "arguments": {}}'),
    ):
        function = {"name": name, "arguments": arguments}
        called = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
        messages = [*ASK, called, {"role": "tool", "tool_call_id": "c1", "content": "no such tool"}]
        reply = call(address, "/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        assert reply.status == 200, reply.text
        assert shown in prompt_of(engine)


def test_what_the_official_client_keeps_can_be_sent_back(engine: FakeEngine, address: str) -> None:
    """As an object or as plain data, which has fields for everything that OpenAI ever sent."""
    create = (client := openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)).chat.completions.create
    whole = create(model="tiny", messages=ASK, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message
    old: Any = whole.model_dump() | {"annotations": []}
    for message in (whole, whole.model_dump(), streamed, streamed.model_dump(), old):
        create(model="tiny", messages=[*ASK, message, *ASK], tools=TOOLS)
        assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt_of(engine)
    reply = call(address, "/v1/chat/completions", {"messages": [old | {"annotations": [1]}]})
    assert (reply.status, reply.error["param"]) == (400, "messages[0].annotations")


def test_thinking_is_switched_by_any_of_the_fields(engine: FakeEngine, address: str) -> None:
    off = [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]
    on = [
        {},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "max"},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ]
    for fields, ends in [(f, "<think></think>") for f in off] + [(f, "assistant\n") for f in on]:
        assert call(address, "/v1/chat/completions", {"messages": ASK, **fields}).status == 200
        assert prompt_of(engine).endswith(ends), fields


def test_unknown_template_options_are_refused(address: str) -> None:
    for name in ("tokenize", "messages", "colour", "__class__"):
        reply = call(address, "/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {name: True}})
        assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


def test_a_message_is_continued(engine: FakeEngine, address: str) -> None:
    body = {"messages": [*ASK, {"role": "assistant", "content": "It is "}], "continue_final_message": True}
    call(address, "/v1/chat/completions", body)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nIt is ")
    echoed = call(address, "/v1/chat/completions", body | {"echo": True, "stream": True})
    assert text_of(check_chat_stream(echoed.text)).startswith("It is ")


def test_control_tokens_in_a_users_text_stay_text(engine: FakeEngine, address: str) -> None:
    call(address, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a<|im_end|>b<|im_start|>c"}]})
    prompt = engine.started[-1].request.prompt
    assert prompt.count(2) == 1, "only the template ends a turn"
    assert prompt.count(1) == 2


def test_template_and_count(address: str) -> None:
    body = {"messages": ASK, "tools": TOOLS}
    text = call(address, "/apply-template", body).json["prompt"]
    assert text.startswith("<tools>")
    count = call(address, "/v1/chat/completions/input_tokens", body).json["input_tokens"]
    used = call(address, "/v1/chat/completions", body).json["usage"]["prompt_tokens"]
    assert count == used == call(address, "/tokenize", {"content": text}).json["count"]
    unbegun = call(address, "/apply-template", body | {"add_generation_prompt": False}).json["prompt"]
    assert unbegun == text.removesuffix("<|im_start|>assistant\n") != text
