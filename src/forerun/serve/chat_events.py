"""What a running chat tells its dialect: deltas, ends, and one summary. Streams and whole answers are made of these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forerun.serve.chat_job import ChatJob

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of an answer, in the order of emission; end tokens are not among them."""

    id: int
    text: str  # the token alone, as the tokenizer decodes it
    data: bytes  # its bytes: several tokens may share a character
    arm: str  # who drafted it ("draft model": the smaller one); "model" where the model chose it
    round: int  # the target pass it came out of; 0: that of the prompt
    logprob: float | None = None
    top: Sequence[tuple[int, str, bytes, float]] = ()  # id, text, bytes, logprob: the likeliest first


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call. The first one of a call has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the prompt has been read, where the request asks for that."""

    choice: int
    total: int
    read: int
    seconds: float
    cached: int = 0  # part of `read`

    def body(self) -> dict[str, Any]:
        """As llama.cpp tells it."""
        return {"total": self.total, "cache": self.cached, "processed": self.read, "time_ms": self.seconds * 1000}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice says next: at most one of reasoning, content and tool call has anything in it."""

    choice: int
    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None
    tokens: Sequence[TokenInfo] = ()  # that said it; behind a call, and at the end, a delta may have nothing but these


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice is over."""

    choice: int
    reason: FinishReason
    stop: str | int | None = None  # the stop string or stop token id of the request that ended it


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all choices; the prompt is counted once."""

    prompt: int
    completion: int
    reasoning: int = 0  # part of completion
    cached: int = 0  # part of prompt


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event: all choices are over."""

    usage: Usage
    # "metrics" in vLLM's form, "timings" in llama.cpp's, "forerun" in ours: ready for JSON.
    statistics: Mapping[str, Any] = field(default_factory=dict)


ChatEvent = PromptProgress | Delta | Finished | Summary


class ChatRun(Protocol):
    """A chat under way. Leaving the iteration, or `close`, stops the work and frees the memory."""

    id: str  # without a prefix
    created: int  # seconds since 1970
    model: str
    prompt_tokens: int

    def __aiter__(self) -> AsyncIterator[ChatEvent]: ...

    async def close(self) -> None: ...


class ChatService(Protocol):
    """Runs chats. What is wrong with a job is an `ApiError` before the first event."""

    model: str  # the name it is served under

    async def start(self, job: ChatJob) -> ChatRun: ...

    async def count_tokens(self, job: ChatJob) -> int: ...
