"""Chat events into those of the Messages API, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.serve.chat_events import ChatEvent, ChatRun, Delta, Finished, Summary, ToolCallDelta, Usage
from forerun.serve.dialects.conversation import arguments_object
from forerun.serve.dialects.transport import EventEncoder, Json
from forerun.serve.error_bodies import anthropic_body
from forerun.serve.errors import ApiError

# Clients send thinking back with its signature, and some leave out thoughts that have none. This server needs none.
SIGNATURE = "forerun"
PING: Json = {"type": "ping"}


class MessagesEncoder(EventEncoder):
    """One message; `answer` is what a client makes of the stream's events."""

    def __init__(self, run: ChatRun, request_id: str, *, statistics: bool = False) -> None:
        """`statistics`: of speculation and time, which the API itself does not have."""
        self._request_id, self._statistics = request_id, statistics
        self.answer: Json = {
            "id": f"msg_{run.id}",
            "type": "message",
            "role": "assistant",
            "model": run.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(prompt=run.prompt_tokens, completion=0)),
        }
        self._over = False
        self._open: str | None = None  # the type of the block that is being written: the last one
        self._pieces: list[str] = []  # of it
        self._ending: Json = {"stop_reason": "end_turn", "stop_sequence": None}

    def start(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": dict(self.answer)}
        yield PING

    def events(self, event: ChatEvent) -> Iterator[Json]:
        if isinstance(event, Delta):
            yield from self._delta(event)
        elif isinstance(event, Finished):
            yield from self._close()
            self._ending = _ending(event)
        elif isinstance(event, Summary):
            yield from self._end(event)

    def failed(self, error: ApiError) -> Json:
        self._over = True
        return anthropic_body(error, self._request_id)

    def ping(self) -> Json | None:
        return None if self._over else PING

    def _delta(self, delta: Delta) -> Iterator[Json]:
        if delta.content:
            if self._open != "text":
                yield from self._next({"type": "text", "text": ""})
            yield self._grown({"type": "text_delta", "text": delta.content}, delta.content)
        elif delta.reasoning:
            if self._open != "thinking":
                yield from self._next({"type": "thinking", "thinking": "", "signature": ""})
            yield self._grown({"type": "thinking_delta", "thinking": delta.reasoning}, delta.reasoning)
        elif delta.tool_call is not None:
            yield from self._call(delta.tool_call)

    def _call(self, call: ToolCallDelta) -> Iterator[Json]:
        if call.id is not None:
            yield from self._next({"type": "tool_use", "id": call.id, "name": call.name or "", "input": {}})
        assert self._open == "tool_use", "arguments come after the call's name"
        if call.arguments:
            yield self._grown({"type": "input_json_delta", "partial_json": call.arguments}, call.arguments)

    @property
    def _index(self) -> int:
        return len(self.answer["content"]) - 1

    def _next(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._open = block["type"]
        self.answer["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _grown(self, delta: Json, piece: str) -> Json:
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._open is None:
            return
        block, whole = self.answer["content"][-1], "".join(self._pieces)
        if self._open == "thinking":
            block["signature"] = SIGNATURE
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": self._index, "delta": signed}
        if self._open == "tool_use":
            block["input"] = arguments_object(whole)
        else:
            block[self._open] = whole
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None
        self._pieces.clear()

    def _end(self, summary: Summary) -> Iterator[Json]:
        usage = _usage(summary.usage)
        self._over = True
        more = summary.statistics if self._statistics else {}
        self.answer |= {**self._ending, "usage": usage, **more}
        yield {"type": "message_delta", "delta": self._ending, "usage": usage, **more}
        yield {"type": "message_stop"}


def _ending(finished: Finished) -> Json:
    if finished.reason == "stop" and isinstance(finished.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": words[finished.reason], "stop_sequence": None}


def _usage(usage: Usage) -> Json:
    """Tokens from a cache are counted apart in this API."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }
