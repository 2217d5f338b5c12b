"""Streams that wait, fail or lose their reader; and readers that leave without a stream."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx2 as httpx
import pytest
from serve_fakes import FakeEngine, app_for, call, live, until
from stream_rules import events_of

from forerun.serve.settings import ServeSettings

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def leave(address: str, body: dict[str, Any], path: str, after: bytes, engine: FakeEngine) -> None:
    """Send a request, read until `after` came and the engine is at it, and close the connection."""
    host, port = address.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b"\r\n" + data)
        seen = b""
        while after and after not in seen:
            seen += connection.recv(65536)
        until(lambda: engine.running)


def test_a_client_that_leaves_stops_the_work() -> None:
    engine = FakeEngine(say=lambda work: "word " * 400, pause=0.01)
    with live(app_for(engine, ServeSettings(ping=0.05))) as address:
        cases = [
            ("/v1/chat/completions", BODY | {"stream": True, "n": 3}, b"word"),
            ("/v1/chat/completions", BODY | {"stream": True}, b"HTTP/1.1 200"),
            ("/v1/chat/completions", BODY | {"stream": True}, b""),
            ("/v1/chat/completions", BODY | {"n": 2}, b""),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 400}, b""),
            ("/v1/completions", {"prompt": "a", "max_tokens": 400, "stream": True}, b"word"),
        ]
        for path, body, after in cases:
            leave(address, body, path, after, engine)
            until(lambda: engine.running == 0)
        assert engine.closed == len(engine.started)
        engine.pause = 0.0
        engine.say = lambda work: "fine"
        assert call(address, "/v1/chat/completions", BODY).json["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_unicode_has_line_ends_that_are_none_in_a_stream(path: str) -> None:
    """httpx reads lines as Python does, which knows more ends of lines than events do."""
    text = "a\u2028b\u2029c\x85d \u2026 é"
    with live(app_for(FakeEngine(say=lambda work: text))) as address:
        asked = {"input": "Hi"} if path == "/v1/responses" else BODY
        more = {"model": "tiny", "max_tokens": 50} if path == "/v1/messages" else {}
        with httpx.stream("POST", address + path, json={**asked, **more, "stream": True}) as reply:
            lines = list(reply.iter_lines())
    assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
    assert text == "".join(said(json.loads(line.removeprefix("data: "))) for line in lines if "data: {" in line)


def said(event: dict[str, Any]) -> str:
    """What an event of a stream says, in three dialects."""
    for choice in event.get("choices", ()):
        return str(choice["delta"].get("content", ""))
    delta = event.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)


def test_a_slow_prompt_gets_pings_and_then_its_answer() -> None:
    engine = FakeEngine(say=lambda work: "ok", pause=0.3)
    with live(app_for(engine, ServeSettings(ping=0.05))) as address:
        reply = call(address, "/v1/chat/completions", BODY | {"stream": True})
        assert reply.text.count(": ping\n\n") >= 2
        assert events_of(reply.text)[-1] == "[DONE]"


def test_failing_before_the_first_token_is_a_status() -> None:
    with live(app_for(FakeEngine(fail_after=0))) as address:
        for stream in (False, True):
            reply = call(address, "/v1/chat/completions", BODY | {"stream": stream})
            assert (reply.status, reply.error["type"]) == (500, "server_error")
            assert "secret" not in reply.text
            assert "0x" not in reply.text


def test_failing_later_is_an_event_and_the_end() -> None:
    engine = FakeEngine(fail_after=2)
    with live(app_for(engine)) as address:
        for path, body in (("/v1/chat/completions", BODY), ("/v1/completions", {"prompt": "a", "max_tokens": 50})):
            reply = call(address, path, body | {"stream": True})
            assert reply.status == 200
            *before, last = [json.loads(event) for event in events_of(reply.text)]
            assert all("error" not in event for event in before)
            assert last["error"]["type"] == "server_error"
            assert "secret" not in reply.text
            assert call(address, path, body).status == 500
        several = call(address, "/v1/chat/completions", BODY | {"stream": True, "n": 3})
        assert "error" in json.loads(events_of(several.text)[-1])
        assert engine.running == 0


def test_many_streams_at_once_stay_apart() -> None:
    """Each says its own number; the texts must not mix."""
    engine = FakeEngine(say=lambda work: f"answer {work.request.sampling.seed}", per_round=1, pause=0.001)
    with live(app_for(engine)) as address:
        from concurrent.futures import ThreadPoolExecutor

        def ask(seed: int) -> str:
            reply = call(address, "/v1/chat/completions", BODY | {"stream": True, "seed": seed, "n": 2})
            chunks = [json.loads(event) for event in events_of(reply.text)[:-1]]
            said = ["", ""]
            for chunk in chunks:
                said[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
            assert said[0] == said[1]
            return said[0]

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(ask, range(32))) == [f"answer {seed}" for seed in range(32)]
