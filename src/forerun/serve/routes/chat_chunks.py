"""Chat events as OpenAI's chunks. A whole answer is the fold of the same events."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.serve.chat_events import ChatEvent, ChatRun, Delta, Finished, Summary, TokenInfo, ToolCallDelta, Usage


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client wants to see of an answer."""

    fingerprint: str
    include_usage: bool = False
    logprobs: bool = False
    token_details: bool = False
    echo: bool = False  # what the answer goes on with is part of it


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprob_entries(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    """One entry per token, whatever chunk it is in."""
    return [
        _entry(token.text, token.data, token.logprob)
        | {"top_logprobs": [_entry(text, data, logprob) for _, text, data, logprob in token.top]}
        for token in tokens
    ]


def _entry(text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def token_details(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    """Where each token came from, for the page."""
    return [{"text": token.text, "source": token.arm, "round": token.round} for token in tokens]


def call_body(call: ToolCallDelta) -> dict[str, Any]:
    """Id, type and name come once, with the first delta of a call."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _said(delta: Delta) -> dict[str, Any]:
    if delta.tool_call is not None:
        return {"tool_calls": [call_body(delta.tool_call)]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    return {"content": delta.content} if delta.content else {}


class Chunks:
    """The chunks of one stream, in the order that the rules for streams ask for."""

    def __init__(self, run: ChatRun, shape: Shape, choices: int, begun: str) -> None:
        """`begun`: text before the answer's own."""
        self._shape, self._choices, self._begun = shape, choices, begun
        self._waiting: dict[int, list[TokenInfo]] = {choice: [] for choice in range(choices)}
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{run.id}",
            "object": "chat.completion.chunk",
            "created": run.created,
            "model": run.model,
            "system_fingerprint": shape.fingerprint,
        }

    async def of(self, events: AsyncIterable[ChatEvent]) -> AsyncIterator[dict[str, Any]]:
        """The role first, then what is said, how it ended, and the usage where it was asked for."""
        for choice in range(self._choices):
            yield self._chunk(choice, {"role": "assistant", "content": self._begun})
        # Without a chunk for the usage, statistics come with the last finish: so that one waits for them.
        last: dict[str, Any] | None = None
        async for event in events:
            if isinstance(event, Delta):
                chunk = self._delta(event)
                if chunk is not None:
                    yield chunk
            elif isinstance(event, Finished):
                if self._waiting[event.choice]:
                    yield self._chunk(event.choice, {"content": ""}, self._taken(event.choice))
                if last is not None:
                    yield last
                last = self._finish(event)
            else:
                async for chunk in self._end(last, event):
                    yield chunk

    async def _end(self, last: dict[str, Any] | None, summary: Summary) -> AsyncIterator[dict[str, Any]]:
        assert last is not None, "every choice is finished before the summary"
        if self._shape.include_usage:
            yield last
            yield self._head | {"choices": [], "usage": usage_body(summary.usage), **summary.statistics}
        else:
            yield last | dict(summary.statistics)

    def _delta(self, delta: Delta) -> dict[str, Any] | None:
        """Tokens that said nothing yet wait for the next delta of their choice."""
        if self._shape.logprobs or self._shape.token_details:
            self._waiting[delta.choice] += delta.tokens
        said = _said(delta)
        return self._chunk(delta.choice, said, self._taken(delta.choice)) if said else None

    def _taken(self, choice: int) -> list[TokenInfo]:
        tokens, self._waiting[choice] = self._waiting[choice], []
        return tokens

    def _chunk(self, choice: int, delta: Mapping[str, Any], tokens: Sequence[TokenInfo] = ()) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._shape.logprobs and tokens:
            body["logprobs"] = {"content": logprob_entries(tokens), "refusal": None}
        if self._shape.token_details and tokens:
            body["token_details"] = token_details(tokens)
        return self._with_usage({"choices": [body]})

    def _finish(self, end: Finished) -> dict[str, Any]:
        body = {"index": end.choice, "delta": {}, "logprobs": None, "finish_reason": end.reason}
        return self._with_usage({"choices": [body | {"stop_reason": end.stop}]})

    def _with_usage(self, body: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | body
        return chunk | {"usage": None} if self._shape.include_usage else chunk


@dataclass(slots=True)
class WholeChoice:
    """One choice as it is put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    end: Finished | None = None

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        call = delta.tool_call
        if call is not None and call.id is not None:
            function = {"name": call.name, "arguments": call.arguments}
            self.calls.append({"id": call.id, "type": "function", "function": function})
        elif call is not None:
            self.calls[call.index]["function"]["arguments"] += call.arguments

    def message(self, begun: str) -> dict[str, Any]:
        content = begun + "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        if reasoning := "".join(self.reasoning):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message


async def whole(run: ChatRun, shape: Shape, choices: int, begun: str) -> dict[str, Any]:
    """The answer in one piece."""
    parts = [WholeChoice() for _ in range(choices)]
    body: dict[str, Any] = {
        "id": f"chatcmpl-{run.id}",
        "object": "chat.completion",
        "created": run.created,
        "model": run.model,
        "system_fingerprint": shape.fingerprint,
    }
    async for event in run:
        if isinstance(event, Delta):
            parts[event.choice].add(event)
        elif isinstance(event, Finished):
            parts[event.choice].end = event
        else:
            body["choices"] = [_whole_choice(index, part, shape, begun) for index, part in enumerate(parts)]
            body |= {"usage": usage_body(event.usage), **event.statistics}
    return body


def _whole_choice(index: int, part: WholeChoice, shape: Shape, begun: str) -> dict[str, Any]:
    assert part.end is not None, "every choice is finished before the summary"
    choice: dict[str, Any] = {
        "index": index,
        "message": part.message(begun),
        "logprobs": {"content": logprob_entries(part.tokens), "refusal": None} if shape.logprobs else None,
        "finish_reason": part.end.reason,
        "stop_reason": part.end.stop,
    }
    if shape.token_details:
        choice["token_details"] = token_details(part.tokens)
    return choice
