"""/v1/responses, driven by the official client: fields in, events and response objects out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from fake_chat import FakeChatService, calls, ends, played, says, thinks, token

from forerun.serve.chat_events import Delta
from forerun.serve.chat_job import ThinkingWish
from forerun.serve.errors import ApiError
from forerun.serve.routes import responses

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Looks outside",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
EVERYTHING = [
    *thinks("Let me ", "see."),
    *says("Look", "ing."),
    *calls(0, "weather", '{"city":', '"Oslo"}'),
    *calls(1, "weather", '{"city":"Rome"}'),
    *ends("tool_calls"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeChatService, str]]:
    with played(responses.router, ping=0.05) as it:
        yield it


@pytest.fixture
def service(server: tuple[FakeChatService, str]) -> FakeChatService:
    server[0].play([*says("Hi"), *ends()])
    return server[0]


@pytest.fixture(scope="module")
def client(server: tuple[FakeChatService, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0)


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    return [event for event in client.responses.create(stream=True, **fields) if event.type != "keepalive"]


def without_time(response: Any) -> dict[str, Any]:
    return {**response.model_dump(), "completed_at": None}


def test_a_stream_has_the_events_of_the_api_in_order(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(EVERYTHING)
    events = events_of(client, model="tiny", input="Weather?", tools=[WEATHER])
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == [0, 1, 2, 3]
    assert [event.item.id for event in added] == [event.item.id for event in done]
    assert [event.item.model_dump() for event in done] == [item.model_dump() for item in events[-1].response.output]


def test_whole_and_streamed_answers_are_equal(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(EVERYTHING)
    whole = client.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
    streamed = events_of(client, model="tiny", input="Weather?", tools=[WEATHER])[-1].response
    assert without_time(whole) == without_time(streamed)
    assert whole.id == "resp_abc" and whole.model == "tiny" and whole.created_at == 1_790_000_000
    thought, message, oslo, rome = whole.output
    assert thought.content[0].text == "Let me see." and thought.summary == []
    assert message.content[0].text == whole.output_text == "Looking."
    assert (oslo.call_id, oslo.name, json.loads(oslo.arguments)) == ("call_0", "weather", {"city": "Oslo"})
    assert (rome.call_id, json.loads(rome.arguments)) == ("call_1", {"city": "Rome"})
    assert whole.status == "completed" and {item.status for item in whole.output} == {"completed"}


def test_usage_and_statistics_come_with_the_answer(service: FakeChatService, client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hello")
    assert response.usage.input_tokens == 11 and response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens == 7 and response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.total_tokens == 18
    assert response.forerun == {"tokens_per_round": 2.5}  # type: ignore[attr-defined]
    assert response.timings["draft_n"] == 3  # type: ignore[attr-defined]
    assert service.closed.wait(5)


def test_the_clients_stream_helper_follows_it(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(EVERYTHING)
    with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Looking."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_who_asks_for_a_summary_of_thoughts_gets_them_as_one(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(EVERYTHING)
    events = events_of(client, model="tiny", input="Weather?", reasoning={"summary": "auto", "effort": "low"})
    types = [event.type.removeprefix("response.") for event in events]
    assert types[2:8] == [
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done"),
    ]
    thought = events[-1].response.output[0]
    assert [part.text for part in thought.summary] == ["Let me see."] and not thought.content
    assert service.job.thinking == ThinkingWish(True, 1024)


def test_an_answer_cut_off_is_incomplete(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play([*says("Once upon"), *ends("length")])
    whole = client.responses.create(model="tiny", input="Tell", max_output_tokens=2)
    last = events_of(client, model="tiny", input="Tell", max_output_tokens=2)[-1]
    assert last.type == "response.incomplete" and without_time(last.response) == without_time(whole)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].status == "incomplete" and whole.usage.output_tokens == 7
    assert service.job.wish.max_tokens == 2


def test_errors_before_the_first_byte_have_a_status(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play([ApiError(429, "Too many.", code="queue_full", headers={"Retry-After": "3"})])
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            client.responses.create(model="tiny", input="Hello", stream=stream)
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "3"
    service.play([ApiError(400, "Too long.", code="context_length_exceeded", n_prompt_tokens=9, n_ctx=8)])
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="Hello")
    assert refused.value.body == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
        "n_prompt_tokens": 9,
        "n_ctx": 8,
    }


def test_codex_learns_of_a_full_context_from_the_stream(
    server: tuple[FakeChatService, str], service: FakeChatService, client: openai.OpenAI
) -> None:
    service.play([ApiError(400, "Too long.", code="context_length_exceeded", n_prompt_tokens=9, n_ctx=8)])
    body = {"input": "Hello", "stream": True}
    assert httpx.post(f"{server[1]}/v1/responses", json=body).status_code == 400
    codex = client.with_options(default_headers={"originator": "codex_cli_rs"})
    events = events_of(codex, model="tiny", input="Hello")
    assert [event.type.removeprefix("response.") for event in events] == ["created", "in_progress", "failed"]
    assert events[-1].response.error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(ApiError(503, "Shutting down."), "server_error", 503), (RuntimeError("secret path"), "server_error", 500)],
)
def test_errors_in_the_middle_are_an_event(
    service: FakeChatService, client: openai.OpenAI, error: Exception, code: str, status: int
) -> None:
    service.play([*says("Hal"), error])
    last = events_of(client, model="tiny", input="Hello")[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == code and "secret" not in last.response.error.message
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model="tiny", input="Hello")
    assert caught.value.status_code == status and "secret" not in str(caught.value)
    assert service.closed.wait(5)


def test_a_silent_stream_shows_signs_of_life(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(["wait", *says("Hi"), *ends()])
    types = []
    for event in client.responses.create(model="tiny", input="Hello", stream=True):
        types.append(event.type)
        if event.type == "keepalive":
            service.go_on.set()
    assert types[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert types[-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work(
    server: tuple[FakeChatService, str], service: FakeChatService, stream: bool
) -> None:
    service.play(["wait", *ends()])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server[1]}/v1/responses", json={"input": "Hi", "stream": stream}, timeout=0.03 if stream else 0.3)
    assert service.closed.wait(5)


def test_logprobs_belong_to_the_text(service: FakeChatService, client: openai.OpenAI) -> None:
    service.play(
        [
            Delta(0, reasoning="Hm", tokens=[token("Hm", -3.0)]),
            Delta(0, content="Hi", tokens=[token("H", -0.5), token("i", -0.25)]),
            Delta(0, tokens=[token("", -1.0)]),
            *ends(),
        ]
    )
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(model="tiny", input="Hello", **fields)
    entries = whole.output[1].content[0].logprobs
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [("H", -0.5, [72]), ("i", -0.25, [105])]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -9]
    events = events_of(client, model="tiny", input="Hello", **fields)
    streamed = [
        entry.logprob for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert streamed == [-0.5, -0.25] and service.job.wish.logprobs == 2


def test_tokens_of_a_request_are_counted(service: FakeChatService, client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count(model="tiny", input="one two three", instructions="be", tools=[WEATHER])
    assert count.input_tokens == 5 and count.object == "response.input_tokens"
