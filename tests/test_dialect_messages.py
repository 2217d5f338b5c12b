"""/v1/messages, driven by the official client: events and messages out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from fake_chat import FakeChatService, calls, ends, played, says, thinks

from forerun.serve.chat_events import Delta
from forerun.serve.errors import ApiError
from forerun.serve.routes import messages

WEATHER: Any = {
    "name": "weather",
    "description": "Looks outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
EVERYTHING = [
    *thinks("Let me ", "see."),
    *says("Look", "ing."),
    *calls(0, "weather", '{"city":', '"Oslo"}'),
    *calls(1, "weather"),
    *ends("tool_calls"),
]
HELLO: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeChatService, str]]:
    with played(messages.router, ping=0.05) as it:
        yield it


@pytest.fixture
def service(server: tuple[FakeChatService, str]) -> FakeChatService:
    server[0].play([*says("Hi"), *ends()])
    return server[0]


@pytest.fixture(scope="module")
def client(server: tuple[FakeChatService, str]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server[1], api_key="none", max_retries=0)


def test_a_stream_has_the_events_of_the_api_in_order(
    server: tuple[FakeChatService, str], service: FakeChatService
) -> None:
    service.play(EVERYTHING)
    reply = httpx.post(f"{server[1]}/v1/messages?beta=true", json={**HELLO, "tools": [WEATHER], "stream": True})
    lines = [line.split(": ", 1) for line in reply.text.splitlines() if line]
    events = [value for field, value in lines if field == "event"]
    assert events[:2] == ["message_start", "ping"]
    block = ["content_block_start", "content_block_stop"]
    delta = "content_block_delta"
    assert [event for event in events if event != "ping"] == [
        "message_start",
        *(block[0], delta, delta, delta, block[1]),  # two thoughts and the signature
        *(block[0], delta, delta, block[1]),
        *(block[0], delta, delta, block[1]),
        *block,
        *("message_delta", "message_stop"),
    ]
    assert {field for field, _ in lines} == {"event", "data"}


def test_whole_and_streamed_answers_are_equal(service: FakeChatService, client: anthropic.Anthropic) -> None:
    service.play(EVERYTHING)
    whole = client.messages.create(**HELLO, tools=[WEATHER])
    with client.messages.stream(**HELLO, tools=[WEATHER]) as stream:
        texts = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert whole.model_dump(exclude_none=True) == streamed.model_dump(exclude_none=True)
    thought, text, oslo, bare = whole.content
    assert (thought.thinking, bool(thought.signature)) == ("Let me see.", True)
    assert text.text == texts == "Looking."
    assert (oslo.id, oslo.name, oslo.input) == ("call_0", "weather", {"city": "Oslo"})
    assert (bare.id, bare.input) == ("call_1", {})
    assert (whole.id, whole.model, whole.role, whole.stop_reason) == ("msg_abc", "tiny", "assistant", "tool_use")


def test_usage_and_statistics_come_with_the_answer(service: FakeChatService, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**HELLO)
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (7, 4, 7)
    assert whole.usage.output_tokens_details.thinking_tokens == 2
    assert not whole.model_extra, "Anthropic's answers have no more"
    events = {event.type: event for event in client.messages.create(**HELLO, stream=True)}
    assert events["message_start"].message.usage.input_tokens == 11
    assert events["message_delta"].usage.output_tokens == 7
    assert not events["message_delta"].model_extra
    asked: Any = {**HELLO, "betas": ["some-other", "forerun-statistics"]}
    assert client.beta.messages.create(**asked).forerun == {"tokens_per_round": 2.5}  # type: ignore[attr-defined]
    events = {event.type: event for event in client.beta.messages.create(**asked, stream=True)}
    assert events["message_delta"].timings["draft_n"] == 3
    assert service.closed.wait(5)


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_ways_to_end(
    service: FakeChatService, client: anthropic.Anthropic, reason: str, stop: Any, expected: tuple[str, str | None]
) -> None:
    service.play([*says("Hi"), *ends(reason, stop)])
    whole = client.messages.create(**HELLO, stop_sequences=["END"])
    with client.messages.stream(**HELLO, stop_sequences=["END"]) as stream:
        streamed = stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence) == expected
    assert service.job.wish.stop == ("END",)


def test_a_call_cut_off_is_kept_as_far_as_it_came(service: FakeChatService, client: anthropic.Anthropic) -> None:
    service.play([*calls(0, "weather", '{"city": "Osl'), *ends("length")])
    whole = client.messages.create(**HELLO, tools=[WEATHER])
    with client.messages.stream(**HELLO, tools=[WEATHER]) as stream:
        streamed = stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.content[0].input == {"city": "Osl"} and streamed.content[0].id == whole.content[0].id


def test_a_number_that_json_cannot_write_again_stays_text(
    service: FakeChatService, client: anthropic.Anthropic
) -> None:
    service.play([*calls(0, "look", '{"far": 1e999}'), *ends("tool_calls")])
    answer = client.messages.create(**HELLO, tools=[WEATHER])
    assert answer.content[0].input == {"arguments": '{"far": 1e999}'}


def test_errors_before_the_first_byte_have_a_status(
    server: tuple[FakeChatService, str], service: FakeChatService, client: anthropic.Anthropic
) -> None:
    service.play([ApiError(429, "Too many.", headers={"Retry-After": "3"})])
    for stream in (False, True):
        with pytest.raises(anthropic.RateLimitError) as caught:
            client.messages.create(**HELLO, stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
    reply = httpx.post(f"{server[1]}/v1/messages", json=HELLO, headers={"X-Request-Id": "mine"})
    assert reply.json() == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "Too many."},
        "request_id": "mine",
    }
    service.play([ApiError(400, "Too long.", code="context_length_exceeded", n_prompt_tokens=9, n_ctx=8)])
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(**HELLO)
    assert long.value.body["error"]["message"] == "prompt is too long: 9 tokens > 8 maximum"
    service.play([ApiError(503, "Loading.")])
    with pytest.raises(anthropic.APIStatusError) as loading:
        client.messages.create(**HELLO)
    assert loading.value.status_code == 503 and loading.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("error", [ApiError(503, "Shutting down."), RuntimeError("secret path")])
def test_errors_in_the_middle_are_an_event(
    server: tuple[FakeChatService, str], service: FakeChatService, client: anthropic.Anthropic, error: Exception
) -> None:
    service.play([*says("Hal"), error])
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(**HELLO, stream=True))
    assert caught.value.body["type"] == "error" and "secret" not in caught.value.body["error"]["message"]
    reply = httpx.post(f"{server[1]}/v1/messages", json={**HELLO, "stream": True})
    assert "message_stop" not in reply.text and reply.text.rstrip().splitlines()[-2] == "event: error"
    with pytest.raises(anthropic.APIStatusError) as whole:
        client.messages.create(**HELLO)
    assert whole.value.status_code == getattr(error, "status", 500) and "secret" not in str(whole.value)
    assert service.closed.wait(5)


def test_a_silent_stream_shows_signs_of_life(server: tuple[FakeChatService, str], service: FakeChatService) -> None:
    service.play(["wait", *says("Hi"), *ends()])
    pings = 0
    with httpx.stream("POST", f"{server[1]}/v1/messages", json={**HELLO, "stream": True}) as reply:
        for line in reply.iter_lines():
            pings += line == "event: ping"
            if pings == 3:
                service.go_on.set()
    assert pings >= 3 and line == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work(
    server: tuple[FakeChatService, str], service: FakeChatService, stream: bool
) -> None:
    service.play(["wait", *ends()])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server[1]}/v1/messages", json={**HELLO, "stream": stream}, timeout=0.03 if stream else 0.3)
    assert service.closed.wait(5)


def test_deltas_of_tokens_alone_say_nothing(service: FakeChatService, client: anthropic.Anthropic) -> None:
    service.play([Delta(0), *says("Hi"), Delta(0), *says("!"), *ends()])
    assert [block.text for block in client.messages.create(**HELLO).content] == ["Hi!"]
