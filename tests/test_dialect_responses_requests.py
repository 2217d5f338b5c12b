"""Requests to /v1/responses: what becomes of items, fields and tools, what is named in a warning, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fake_chat import FakeChatService, calls, ends, played, says

from forerun.serve.chat_job import OutputFormat, Speculation, ThinkingWish, Tool, ToolChoice
from forerun.serve.routes import responses

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Looks outside",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeChatService, str]]:
    with played(responses.router) as it:
        yield it


@pytest.fixture
def service(server: tuple[FakeChatService, str]) -> FakeChatService:
    server[0].play([*says("Hi"), *ends()])
    return server[0]


@pytest.fixture(scope="module")
def client(server: tuple[FakeChatService, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0)


def test_items_become_messages(service: FakeChatService, client: openai.OpenAI) -> None:
    client.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
            {"type": "message", "role": "user", "content": "C"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []} for text in ("Look", "ing.")],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city":"Ro'},
            {"type": "function_call_output", "call_id": "c1", "output": "snow"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "Aha."}]},
            {"role": "assistant", "content": "Snow and sun."},
            {"role": "user", "content": "Thanks"},
        ],
        tools=[WEATHER],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    cut = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ro"}}}
    assert service.job.messages == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "A\n\nB\n\nC"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "Hm.", "tool_calls": [call, cut]},
        {"role": "tool", "tool_call_id": "c1", "content": "snow", "name": "weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun", "name": "weather"},
        {"role": "assistant", "content": "Snow and sun.", "reasoning_content": "Aha."},
        {"role": "user", "content": "Thanks"},
    ]
    assert service.job.tools == [Tool("weather", "Looks outside", WEATHER["parameters"])]


def test_fields_become_wishes(service: FakeChatService, client: openai.OpenAI) -> None:
    schema = {"type": "object"}
    response = client.responses.create(
        model="tiny",
        input="Hello",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}},
        metadata={"run": "7"},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "seed": -3,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logit_bias": {"5": -100},
            "min_tokens": 2,
            "ignore_eos": True,
            "stop": ["END"],
            "stop_token_ids": [4],
            "speculative": 3,
            "thinking_budget": 10,
            "chat_template_kwargs": {"enable_thinking": True, "date": "now"},
        },
    )
    wish = service.job.wish
    assert (wish.sampling.temperature, wish.sampling.top_p, wish.sampling.top_k) == (0.5, 0.9, 5)
    assert (wish.sampling.min_p, wish.sampling.seed, wish.sampling.repetition_penalty) == (0.1, -3, 1.1)
    assert (wish.sampling.presence_penalty, wish.sampling.frequency_penalty) == (0.2, 0.3)
    assert wish.sampling.logit_bias == {5: -100} and wish.defaults == {"temperature": 1.0}
    assert (wish.max_tokens, wish.min_tokens, wish.ignore_eos) == (9, 2, True)
    assert (wish.stop, wish.stop_token_ids, wish.n) == (("END",), (4,), 1)
    assert wish.speculation == Speculation("auto", 3)
    assert wish.output == OutputFormat("json_schema", schema, "text.format")
    assert service.job.thinking == ThinkingWish(True, 10)
    assert service.job.template_options == {"date": "now"}
    assert response.metadata == {"run": "7"} and response.temperature == 0.5
    assert response.text.format.type == "json_schema"
    client.responses.create(
        model="tiny", input="Hello", text={"format": {"type": "json_object"}}, reasoning={"effort": "none"}
    )
    assert service.job.wish.output == OutputFormat(
        "json_object", param="text.format"
    ) and service.job.thinking == ThinkingWish(False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("named", "weather")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice("required"),
        ),
    ],
)
def test_forms_of_tool_choice(
    service: FakeChatService, client: openai.OpenAI, choice: Any, expected: ToolChoice
) -> None:
    client.responses.create(model="tiny", input="Hello", tools=[WEATHER], tool_choice=choice)
    assert service.job.tool_choice == expected and [tool.name for tool in service.job.tools] == ["weather"]
    client.responses.create(model="tiny", input="Hello", tools=[WEATHER], parallel_tool_calls=False)
    assert service.job.tool_choice == ToolChoice("auto", parallel=False)


def test_functions_in_namespaces_are_called_by_joined_names(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play([*calls(0, "mcp__files__read", "{}"), *ends("tool_calls")])
    inner = {**WEATHER, "name": "read"}
    free = {"type": "custom", "name": "patch", "description": "", "format": {"type": "text"}}
    reply = client.responses.with_raw_response.create(
        model="tiny",
        input=[
            {"role": "user", "content": "Read"},
            {"type": "function_call", "call_id": "a", "name": "read", "namespace": "mcp__files", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "text"},
        ],
        tools=[{"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [inner, free]}],
    )
    assert [tool.name for tool in service.job.tools] == ["mcp__files__read"]
    assert service.job.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__files__read"
    call = reply.parse().output[0]
    assert (call.name, call.namespace) == ("read", "mcp__files")
    assert reply.headers["x-forerun-warning"] == "not used: description of mcp__files, tool mcp__files.patch"


def test_what_has_no_effect_is_named(service: FakeChatService, client: openai.OpenAI) -> None:
    reply = client.responses.with_raw_response.create(
        model="gpt-x",
        input=[{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "w", "status": "completed"}],
        tools=[WEATHER, {"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "pätch"}],
        include=["reasoning.encrypted_content"],
        store=True,
        prompt_cache_key="k",
        user="u",
        service_tier="flex",
        truncation="auto",
    )
    assert [tool.name for tool in service.job.tools] == ["weather"]
    assert [tool.type for tool in reply.parse().tools] == ["function"]
    assert reply.headers["x-forerun-warning"] == (
        "not used: model 'gpt-x' (this is 'tiny'), truncation, store, prompt_cache_key, user, service_tier, "
        "include reasoning.encrypted_content, tool web_search, tool local_shell, tool custom 'p?tch', "
        "input item web_search_call"
    )
    quiet = client.responses.with_raw_response.create(model="tiny", input="Hi", store=False)
    assert "x-forerun-warning" not in quiet.headers


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"input": []}, "input", None),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/a.png"}]}]},
            "input[0].content[0].image_url",
            None,
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
            "input[0].content[0].file_id",
            "unsupported_media",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0]",
            "unsupported_media",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}]},
            "input[0].content[0]",
            "unsupported_media",
        ),
        ({"input": [{"type": "strange"}]}, "input[0]", "invalid_value"),
        ({"input": [{"role": "user", "content": "a", "zzz": 1}]}, "input[0].zzz", "unknown_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice", None),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": ["a"]}]}},
            "tool_choice.tools[0].name",
            None,
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", None),
        ({"chat_template_kwargs": {"enable_thinking": 3}}, "chat_template_kwargs", None),
        ({"speculative": "magic"}, "speculative", None),
        ({"speculative": 10**9}, "speculative", None),
    ],
)
def test_what_cannot_be_had_is_refused(
    server: tuple[FakeChatService, str], service: FakeChatService, fields: dict[str, Any], param: str, code: str | None
) -> None:
    reply = httpx.post(f"{server[1]}/v1/responses", json={"input": "Hello", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b'{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"x": NaN}}]}', "finite numbers"),
        (b'{"input": "a", "user": "\\ud800"}', "whole characters"),
    ],
)
def test_bodies_that_are_no_requests_are_refused(server: tuple[FakeChatService, str], body: bytes, said: str) -> None:
    reply = httpx.post(f"{server[1]}/v1/responses", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


def test_a_body_of_another_type_is_told_what_to_be(server: tuple[FakeChatService, str]) -> None:
    reply = httpx.post(f"{server[1]}/v1/responses", content=b'{"input": "a"}', headers={"content-type": "text/plain"})
    assert reply.status_code == 400 and "sent as application/json" in reply.json()["error"]["message"]
