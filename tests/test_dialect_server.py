"""Thinking and tool calls through the whole server in both dialects, and what clients send back of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from serve_fakes import FakeEngine, app_for, live
from test_serve_tools import CALLS, TEMPLATE, prompt_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("weather", "time")
]
TOOLS: Any = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
QUESTION = "What is the weather in Paris?"
# As the template of these tests renders the answer when it comes back with one result for each call.
SENT_BACK = (
    "<|im_start|>assistant\n<think>I look it up.</think>One moment."
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {"city": "Rome, \\"Italy\\""}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
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


@pytest.mark.parametrize("per_round", [1, 3, 1000])
def test_responses(engine: FakeEngine, address: str, per_round: int) -> None:
    engine.per_round = per_round
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "tiny", "tools": FUNCTIONS, "reasoning": {"summary": "auto"}}
    whole = client.responses.create(input=QUESTION, **asked)
    with client.responses.stream(input=QUESTION, **asked) as stream:
        streamed = stream.until_done().get_final_response()
    assert [said(item) for item in whole.output] == [said(item) for item in streamed.output]
    assert [said(item) for item in whole.output] == [
        "I look it up.",
        "One moment.",
        ("weather", {"city": "Paris"}),
        ("time", {"city": 'Rome, "Italy"'}),
    ]
    assert whole.usage.model_dump() == streamed.usage.model_dump()
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(whole.output[2:], ("sun", "noon"), strict=True)
    ]
    for kept in (whole.output, [item.model_dump() for item in whole.output], streamed.output):
        client.responses.create(input=[{"role": "user", "content": QUESTION}, *kept, *results], **asked)
        assert prompt_of(engine).endswith(SENT_BACK)


def test_logprobs_of_a_message_do_not_depend_on_the_rounds(engine: FakeEngine, address: str) -> None:
    """A round may end thinking and begin the text: the text's tokens are not the thinking's."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    found = []
    for per_round in (1, 2, 3, 7, 1000):
        engine.per_round = per_round
        answer = client.responses.create(model="tiny", input=QUESTION, tools=FUNCTIONS, top_logprobs=1)
        found.append([entry.model_dump() for entry in answer.output[1].content[0].logprobs])
    assert found == found[:1] * len(found)
    assert "".join(entry["token"] for entry in found[0]).endswith("One moment.")


def said(item: Any) -> Any:
    if item.type == "function_call":
        return item.name, json.loads(item.arguments)
    return (item.summary if item.type == "reasoning" else item.content)[0].text


@pytest.mark.parametrize("per_round", [1, 3, 1000])
def test_messages(engine: FakeEngine, address: str, per_round: int) -> None:
    engine.per_round = per_round
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    turn: Any = {"role": "user", "content": QUESTION}
    asked: Any = {"model": "tiny", "max_tokens": 1000, "tools": TOOLS}
    whole = client.messages.create(messages=[turn], **asked)
    with client.messages.stream(messages=[turn], **asked) as stream:
        streamed = stream.get_final_message()
    blocks = [block.model_dump(exclude={"id"}, exclude_none=True) for block in whole.content]
    assert blocks == [block.model_dump(exclude={"id"}, exclude_none=True) for block in streamed.content]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "I look it up." and blocks[1]["text"] == "One moment."
    assert [block["input"] for block in blocks[2:]] == [{"city": "Paris"}, {"city": 'Rome, "Italy"'}]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.model_dump() == streamed.usage.model_dump()
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": output}
        for block, output in zip(whole.content[2:], ("sun", "noon"), strict=True)
    ]
    answer: Any = {"role": "assistant", "content": whole.content}
    client.messages.create(messages=[turn, answer, {"role": "user", "content": results}], **asked)
    assert prompt_of(engine).endswith(SENT_BACK)
    assert client.messages.count_tokens(model="tiny", messages=[turn], tools=TOOLS).input_tokens == sum(
        (whole.usage.input_tokens, whole.usage.cache_read_input_tokens or 0)
    )


def test_a_beginning_is_gone_on_with(engine: FakeEngine, address: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    turns: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is"}]
    client.messages.create(model="tiny", max_tokens=5, messages=turns)
    assert prompt_of(engine).endswith("<|im_start|>assistant\nIt is")
