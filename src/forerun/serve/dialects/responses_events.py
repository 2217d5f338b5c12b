"""Chat events into those of the Responses API, and the response object that they add up to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from forerun.serve.chat_events import ChatEvent, ChatRun, Delta, Finished, PromptProgress, Summary, ToolCallDelta, Usage
from forerun.serve.dialects.responses_job import NamespacedTools
from forerun.serve.dialects.responses_output import CallItem, MessageItem, OutputItem, ReasoningItem
from forerun.serve.dialects.responses_request import ResponsesRequest
from forerun.serve.dialects.transport import EventEncoder, Json
from forerun.serve.errors import ApiError


class Named(NamedTuple):
    """What a response is called: as its run is, or by itself where none could be started."""

    id: str
    created: int
    model: str


class ResponsesEncoder(EventEncoder):
    """One response; `answer` is the same object that the last event of a stream carries."""

    def __init__(self, run: ChatRun | Named, request: ResponsesRequest, declared: NamespacedTools) -> None:
        self._run_id, self._places = run.id, declared.places
        self.answer = _empty_response(run, request, declared)
        options = request.reasoning
        self._as_summary = options is not None and (options.summary or options.generate_summary or "none") != "none"
        self._open: OutputItem | None = None
        self._reason: str = "stop"
        self._sent = 0  # events so far, which is the next one's number

    def start(self) -> Iterator[Json]:
        yield self._numbered({"type": "response.created", "response": dict(self.answer)})
        yield self._numbered({"type": "response.in_progress", "response": dict(self.answer)})

    def events(self, event: ChatEvent) -> Iterator[Json]:
        for data in self._unnumbered(event):
            yield self._numbered(data)

    def failed(self, error: ApiError) -> Json:
        self.answer |= {"status": "failed", "error": _failure(error)}
        return self._numbered({"type": "response.failed", "response": self.answer})

    def ping(self) -> Json | None:
        """OpenAI's own sign of life. Codex counts the time between events, and a comment is none."""
        return self._numbered({"type": "keepalive"}) if self.answer["status"] == "in_progress" else None

    def _numbered(self, data: Json) -> Json:
        data["sequence_number"] = self._sent
        self._sent += 1
        return data

    def _unnumbered(self, event: ChatEvent) -> Iterator[Json]:
        if isinstance(event, PromptProgress):
            progress = {"response": dict(self.answer), "prompt_progress": event.body()}
            yield {"type": "response.in_progress", **progress}
        elif isinstance(event, Delta):
            yield from self._delta(event)
        elif isinstance(event, Finished):
            self._reason = event.reason
            yield from self._close("incomplete" if event.reason == "length" else "completed")
        elif isinstance(event, Summary):
            yield self._end(event)

    def _delta(self, delta: Delta) -> Iterator[Json]:
        if delta.content:
            if not isinstance(self._open, MessageItem):
                yield from self._next(MessageItem(self._item_id("msg"), self._index))
            assert isinstance(self._open, MessageItem)
            yield from self._open.grow(delta.content, delta.tokens)
        elif delta.reasoning:
            if not isinstance(self._open, ReasoningItem):
                yield from self._next(ReasoningItem(self._item_id("rs"), self._index, self._as_summary))
            assert isinstance(self._open, ReasoningItem)
            yield from self._open.grow(delta.reasoning)
        elif delta.tool_call is not None:
            yield from self._call(delta.tool_call)

    def _call(self, call: ToolCallDelta) -> Iterator[Json]:
        if call.id is not None:
            namespace, name = self._places.get(call.name or "", (None, call.name or ""))
            yield from self._next(CallItem(self._item_id("fc"), self._index, call.id, name, namespace))
        assert isinstance(self._open, CallItem), "arguments come after the call's name"
        yield from self._open.grow(call.arguments)

    def _next(self, item: OutputItem) -> Iterator[Json]:
        # `item` was numbered for the place after the one that is open.
        yield from self._close("completed")
        self._open = item
        yield from item.opened()

    def _close(self, status: str) -> Iterable[Json]:
        if self._open is not None:
            yield from self._open.closed(status)
            self.answer["output"].append(self._open.done(status))
            self._open = None

    @property
    def _index(self) -> int:
        """Of the next item."""
        return len(self.answer["output"]) + (self._open is not None)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._run_id}_{self._index}"

    def _end(self, summary: Summary) -> Json:
        cut_off = self._reason == "length"
        status = "incomplete" if cut_off else "completed"
        self.answer |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "completed_at": None if cut_off else int(time.time()),
            "usage": _usage(summary.usage),
            **summary.statistics,
        }
        return {"type": f"response.{status}", "response": self.answer}


def _failure(error: ApiError) -> dict[str, Any]:
    """In the words of the Responses API. Clients decide by the code whether to try again."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status >= 500:
        code = "server_error"
    else:
        code = error.code or "invalid_prompt"
    return {"code": code, "message": error.message}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _empty_response(run: ChatRun | Named, request: ResponsesRequest, declared: NamespacedTools) -> Json:
    """With everything that is known before the answer; what the request left open is null."""
    dumped = request.model_dump(exclude_none=True, by_alias=True)
    text, reasoning = dumped.get("text", {}), dumped.get("reasoning", {})
    return {
        "id": f"resp_{run.id}",
        "object": "response",
        "created_at": run.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": run.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": declared.echoed,
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
