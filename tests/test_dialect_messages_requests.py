"""Requests to /v1/messages: what becomes of blocks, fields and tools, what is named in a warning, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from fake_chat import FakeChatService, ends, played, says

from forerun.serve.chat_job import OutputFormat, Speculation, ThinkingWish, Tool, ToolChoice
from forerun.serve.routes import messages

WEATHER: Any = {
    "name": "weather",
    "description": "Looks outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}
CACHED = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "YQ=="}}
URL, SVG = {"type": "url", "url": "http://x/a.png"}, {"type": "base64", "media_type": "image/svg+xml", "data": "YQ=="}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeChatService, str]]:
    with played(messages.router) as it:
        yield it


@pytest.fixture
def service(server: tuple[FakeChatService, str]) -> FakeChatService:
    server[0].play([*says("Hi"), *ends()])
    return server[0]


@pytest.fixture(scope="module")
def client(server: tuple[FakeChatService, str]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server[1], api_key="none", max_retries=0)


def text(said: str, **more: Any) -> Any:
    return {"type": "text", "text": said, **more}


def test_blocks_become_messages(service: FakeChatService, client: anthropic.Anthropic) -> None:
    use = {"type": "tool_use", "name": "weather"}
    result = {"type": "tool_result"}
    document = {"type": "document", "title": "Map", "source": {"type": "text", "media_type": "text/plain", "data": "N"}}
    found = {"type": "search_result", "source": "u", "title": "T", "content": [text("c")]}
    client.messages.create(
        model="tiny",
        max_tokens=5,
        system=[text("x-anthropic-billing-header: cc_version=2; cch=1;"), text("Be brief."), text("Use tools.")],
        messages=[
            {"role": "user", "content": [text("A"), text("B"), document]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("Looking."),
                    {**use, "id": "c1", "input": {"city": "Oslo"}},
                    {**use, "id": "c2", "input": {}},
                    {**use, "id": "c3", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {**result, "tool_use_id": "c1", "content": "snow"},
                    {**result, "tool_use_id": "c2", "content": [text("no"), text("city")], "is_error": True},
                    {**result, "tool_use_id": "c3", "content": [found]},
                    text("And now?"),
                ],
            },
            {"role": "system", "content": "It is late."},
            {"role": "assistant", "content": "It snows"},
        ],
        tools=[WEATHER],
    )
    call = [{"id": f"c{i}", "type": "function", "function": {"name": "weather", "arguments": {}}} for i in (1, 2, 3)]
    call[0]["function"] = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert service.job.messages == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "A\n\nB\n\nMap\nN"},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "Hm.", "tool_calls": call},
        {"role": "tool", "tool_call_id": "c1", "content": "snow", "name": "weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no\n\ncity", "name": "weather"},
        {"role": "tool", "tool_call_id": "c3", "content": "T\nu\nc", "name": "weather"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "It is late."},
        {"role": "assistant", "content": "It snows"},
    ]
    assert service.job.continue_last
    assert service.job.tools == [Tool("weather", "Looks outside", WEATHER["input_schema"])]


def test_only_the_beginning_of_an_answer_is_gone_on_with(service: FakeChatService, client: anthropic.Anthropic) -> None:
    client.messages.create(**HELLO)
    assert not service.job.continue_last
    called = {
        "role": "assistant",
        "content": [text("Hm"), {"type": "tool_use", "id": "a", "name": "weather", "input": {}}],
    }
    client.messages.create(**{**HELLO, "messages": [*HELLO["messages"], called]})
    assert not service.job.continue_last


def test_fields_become_wishes(service: FakeChatService, client: anthropic.Anthropic) -> None:
    schema = {"type": "object"}
    client.messages.create(
        **HELLO,
        stop_sequences=["END"],
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        extra_body={  # the client has no names for the first three any more, older ones do
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "min_p": 0.1,
            "speculative": "off",
            "chat_template_kwargs": {"a": 1},
        },
    )
    wish = service.job.wish
    assert (wish.sampling.temperature, wish.sampling.top_p, wish.sampling.top_k) == (0.5, 0.9, 5)
    assert (wish.sampling.min_p, wish.sampling.seed, wish.max_tokens) == (0.1, 3, 100)
    assert wish.stop == ("END",) and wish.defaults == {"temperature": 1.0}
    assert wish.speculation == Speculation("off")
    assert wish.output == OutputFormat("json_schema", schema, "output_config.format")
    assert service.job.template_options == {"a": 1}


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, ThinkingWish(True, 2000)),
        ({"type": "disabled"}, ThinkingWish(False)),
        ({"type": "adaptive"}, ThinkingWish()),
    ],
)
def test_forms_of_thinking(
    service: FakeChatService, client: anthropic.Anthropic, thinking: Any, expected: ThinkingWish
) -> None:
    client.messages.create(**HELLO, thinking=thinking)
    assert service.job.thinking == expected


def test_effort_bounds_thinking_where_no_budget_does(service: FakeChatService, client: anthropic.Anthropic) -> None:
    client.messages.create(**HELLO, thinking={"type": "adaptive"}, output_config={"effort": "medium"})
    assert service.job.thinking == ThinkingWish(None, 8192)
    client.messages.create(**HELLO, thinking={"type": "enabled", "budget_tokens": 7}, output_config={"effort": "max"})
    assert service.job.thinking == ThinkingWish(True, 7)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "weather"}, ToolChoice("named", "weather")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_forms_of_tool_choice(
    service: FakeChatService, client: anthropic.Anthropic, choice: Any, expected: ToolChoice
) -> None:
    client.messages.create(**HELLO, tools=[WEATHER], tool_choice=choice)
    assert service.job.tool_choice == expected


def test_what_has_no_effect_is_named(service: FakeChatService, client: anthropic.Anthropic) -> None:
    reply = client.beta.messages.with_raw_response.create(
        model="claude-x",
        max_tokens=5,
        betas=["context-management-2025-06-27"],
        system=[text("x-anthropic-billing-header: cc"), text("Be brief.", **CACHED)],
        messages=[{"role": "user", "content": [text("Hello", **CACHED)]}],
        tools=[{**WEATHER, **CACHED}, {"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive", "display": "summarized"},
    )
    assert reply.headers["x-forerun-warning"] == (
        "not used: model 'claude-x' (this is 'tiny'), context_management, metadata, billing header, cache_control, "
        "tool web_search_20250305, thinking.display"
    )
    assert [tool.name for tool in service.job.tools] == ["weather"]
    assert service.job.messages[0]["content"] == "Be brief."
    assert "x-forerun-warning" not in client.messages.with_raw_response.create(**HELLO).headers


def test_messages_of_the_system_may_change_tools_and_pass_away(
    service: FakeChatService, client: anthropic.Anthropic
) -> None:
    user, assistant = {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}
    late = {**WEATHER, "name": "late"}
    reference = {"type": "tool_reference", "name": "weather"}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": late}},
        {"type": "tool_removal", "tool": reference},
        text("Only now."),
    ]
    passing: Any = {"role": "system", "content": changes, "clear_at": "next_user_message"}
    hasty: Any = {"role": "system", "output_config": {"effort": "low"}}
    asked: Any = {"model": "tiny", "max_tokens": 5, "tools": [WEATHER]}
    client.beta.messages.create(**asked, messages=[user, passing, hasty])
    assert [tool.name for tool in service.job.tools] == ["late"]
    assert service.job.messages == [user, {"role": "system", "content": "Only now."}]
    assert service.job.thinking == ThinkingWish(None, 1024)
    back: Any = {"role": "system", "content": [{"type": "tool_addition", "tool": reference}]}
    client.beta.messages.create(**asked, messages=[user, passing, assistant, user, back])
    assert [tool.name for tool in service.job.tools] == ["weather", "late"]
    assert service.job.messages == [user, assistant, user]


def test_unknown_fields_of_claude_code_are_named(server: tuple[FakeChatService, str], service: FakeChatService) -> None:
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14,claude-code-20250219"}
    body = {**HELLO, "tomorrow": 1, "stream": True}
    reply = httpx.post(f"{server[1]}/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200 and reply.headers["x-forerun-warning"] == "not used: tomorrow"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nonsense": 1}, "'nonsense' is not supported"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "Media belong into messages of the user"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "Media belong into messages of the user"),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "source": URL}]}]}, "this server fetches none"),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "source": SVG}]}]}, "media_type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{**IMAGE, "source": URL}]}],
                    }
                ]
            },
            "this server fetches none",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://x"}}]}
                ]
            },
            "'document' cannot be read here",
        ),
        ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "no place here"),
        ({"messages": [{"role": "system", "content": [{"type": "server_tool_use", "id": "a"}]}]}, "no place here"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "m"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "no tools to call"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "'other'"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "needs a name"),
        ({"tools": [{"name": "bare"}]}, "input_schema"),
        ({"temperature": 9}, "temperature"),
    ],
)
def test_what_cannot_be_had_is_refused(
    server: tuple[FakeChatService, str], service: FakeChatService, fields: dict[str, Any], said: str
) -> None:
    reply = httpx.post(f"{server[1]}/v1/messages", json={**HELLO, **fields})
    body = reply.json()
    assert reply.status_code == 400 and body["type"] == "error" and body["request_id"]
    assert body["error"]["type"] == "invalid_request_error" and said in body["error"]["message"]


def test_tokens_of_a_request_are_counted(service: FakeChatService, client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "one two three"}]
    count = client.messages.count_tokens(model="tiny", messages=asked, system="be", tools=[WEATHER])
    assert count.input_tokens == 5
    beta = client.beta.messages.count_tokens(model="tiny", messages=asked, thinking={"type": "adaptive"})
    assert beta.input_tokens == 3
