"""The rules of OpenAI's streams, checked on the bytes that came over the wire."""

from __future__ import annotations

import json
from typing import Any


def events_of(body: str) -> list[str]:
    """The data of each event; comments are pings and are dropped."""
    assert body.endswith("\n\n"), "every event ends with an empty line"
    data = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), block
        if lines:
            assert len(lines) == 1, "one line of data"
            data.append(lines[0].removeprefix("data: "))
    return data


def check_chat_stream(
    body: str, *, choices: int = 1, include_usage: bool = False, broken: bool = False
) -> list[dict[str, Any]]:
    """The chunks of a chat, once all rules hold. `broken`: the model itself writes bytes that are no characters."""
    events = events_of(body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "[DONE]" not in events[:-1]
    _check_heads(chunks, "chat.completion.chunk", "chatcmpl-")
    if include_usage:
        *chunks_with_choices, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks_with_choices)
    else:
        chunks_with_choices, last = chunks, chunks[-1]
        assert all("usage" not in chunk for chunk in chunks)
    assert "timings" in last
    assert all("timings" not in chunk for chunk in chunks if chunk is not last)
    for index in range(choices):
        mine = [chunk["choices"][0] for chunk in chunks_with_choices if chunk["choices"][0]["index"] == index]
        _check_choice(mine)
        assert broken or not any("\ufffd" in str(part["delta"]) for part in mine), "a character was cut"
    assert all(len(chunk["choices"]) == 1 for chunk in chunks_with_choices)
    assert {chunk["choices"][0]["index"] for chunk in chunks_with_choices} == set(range(choices))
    return chunks


def _check_heads(chunks: list[dict[str, Any]], kind: str, prefix: str) -> None:
    assert chunks
    for name in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1, f"{name} changes"
    assert chunks[0]["object"] == kind
    assert chunks[0]["id"].startswith(prefix)


def _check_choice(parts: list[dict[str, Any]]) -> None:
    first, *middle, last = parts
    assert first["delta"]["role"] == "assistant"
    assert all("role" not in part["delta"] for part in (*middle, last)), "the role comes once"
    assert all(part["finish_reason"] is None for part in parts[:-1]), "null, not absent"
    assert last["delta"] == {}, "the end says nothing"
    assert last["finish_reason"] in ("stop", "length", "tool_calls")
    assert all(part["delta"] for part in parts[:-1]), "only the end is empty"
    for part in middle:
        delta = part["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
    _check_calls([call for part in parts for call in part["delta"].get("tool_calls", ())])


def _check_calls(calls: list[dict[str, Any]]) -> None:
    """A call begins with its id, type and name; the indices count up."""
    begun = -1
    for call in calls:
        if "id" in call:
            begun += 1
            assert call["type"] == "function"
            assert call["function"]["name"]
        else:
            assert "name" not in call["function"]
        assert call["index"] == begun


def check_text_stream(body: str, *, choices: int = 1, include_usage: bool = False) -> list[dict[str, Any]]:
    """The chunks of a text completion, once all rules hold."""
    events = events_of(body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    _check_heads(chunks, "text_completion", "cmpl-")
    with_choices = chunks[:-1] if include_usage else chunks
    assert all(("usage" in chunk) == include_usage for chunk in chunks)
    for index in range(choices):
        mine = [chunk["choices"][0] for chunk in with_choices if chunk["choices"][0]["index"] == index]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] in ("stop", "length")
        assert mine[-1]["text"] == ""
    return chunks


def text_of(chunks: list[dict[str, Any]], name: str = "content", choice: int = 0) -> str:
    """What a choice said, put together."""
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(delta.get(name) or "" for delta in deltas)
