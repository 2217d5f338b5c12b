"""Answers in OpenAI's form for completions: chunks of a stream, or one body with the same choices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forerun import __version__
from forerun.serve.chat_events import ChatEvent, ChatRun, Delta, Finished, PromptProgress, Summary, TokenInfo, Usage
from forerun.serve.dialects.transport import EventEncoder, Json
from forerun.serve.error_bodies import openai_body
from forerun.serve.errors import ApiError
from forerun.serve.routes.openai_fields import GenerationFields
from forerun.serve.sse import DONE


@dataclass(slots=True)
class WholeChoice:
    """One choice as it is put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
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


class CompletionEncoder(EventEncoder):
    """What chat and text completions have in common: everything but how a choice says something."""

    last_line = DONE
    id_prefix: str
    chunk_object: str
    whole_object: str

    def __init__(self, run: ChatRun, request: GenerationFields, choices: int, with_logprobs: bool) -> None:
        self.choices, self.with_logprobs = choices, with_logprobs
        self._include_usage, self._token_details = request.include_usage, bool(request.return_token_details)
        self._waiting: list[list[TokenInfo]] = [[] for _ in range(choices)]  # their text has not come yet
        # Without a chunk for the usage, statistics come with the last finish: so that one waits for them.
        self._finish: Json | None = None
        self._head = {
            "id": f"{self.id_prefix}-{run.id}",
            "object": self.chunk_object,
            "created": run.created,
            "model": run.model,
            "system_fingerprint": f"forerun-{__version__}",
        }

    @abstractmethod
    def said(self, text: str) -> Json:
        """A choice of a chunk that says this text, or nothing."""

    @abstractmethod
    def logprobs(self, choice: int, tokens: Sequence[TokenInfo]) -> Json:
        """Log probabilities of the next tokens of a choice."""

    @abstractmethod
    def message(self, index: int, whole: WholeChoice) -> Json:
        """All that a choice said, as it stands in the answer."""

    def delta(self, delta: Delta) -> Json | None:
        """A choice of a chunk that says this; None: there is nothing to say."""
        return self.said(delta.content) if delta.content else None

    def start(self) -> Iterator[Json]:
        """Nothing, unless the kind of completion has something."""
        yield from ()

    def events(self, event: ChatEvent) -> Iterator[Json]:
        """What is said, how it ended, and the usage where it was asked for."""
        if isinstance(event, PromptProgress):
            yield self.chunk(event.choice, self.said_nothing()) | {"prompt_progress": event.body()}
        elif isinstance(event, Delta):
            # Tokens that said nothing yet wait for the next delta of their choice.
            if self.with_logprobs or self._token_details:
                self._waiting[event.choice] += event.tokens
            said = self.delta(event)
            if said is not None:
                yield self._with_waiting(event.choice, said)
        elif isinstance(event, Finished):
            if self._waiting[event.choice]:
                yield self._with_waiting(event.choice, self.said(""))
            if self._finish is not None:
                yield self._finish
            ended = {"finish_reason": event.reason, "stop_reason": event.stop}
            self._finish = self.chunk(event.choice, self.said_nothing() | ended)
        else:
            yield from self._end(event)

    def said_nothing(self) -> Json:
        """The choice of a chunk that only tells how it ended."""
        return self.said("")

    def failed(self, error: ApiError) -> Json:
        return openai_body(error)

    def chunk(self, choice: int, said: Json, tokens: Sequence[TokenInfo] = ()) -> Json:
        """With the tokens that belong to what is said."""
        body: Json = {"index": choice, "logprobs": None, "finish_reason": None} | said
        if self.with_logprobs and tokens:
            body["logprobs"] = self.logprobs(choice, tokens)
        if self._token_details and tokens:
            body["token_details"] = token_details(tokens)
        chunk = self._head | {"choices": [body]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _with_waiting(self, choice: int, said: Json) -> Json:
        tokens, self._waiting[choice] = self._waiting[choice], []
        return self.chunk(choice, said, tokens)

    def _end(self, summary: Summary) -> Iterator[Json]:
        assert self._finish is not None, "every choice is finished before the summary"
        if self._include_usage:
            yield self._finish
            yield self._head | {"choices": [], "usage": usage_body(summary.usage), **summary.statistics}
        else:
            yield self._finish | dict(summary.statistics)

    async def whole(self, run: ChatRun) -> Json:
        """The fold of the same events."""
        parts = [WholeChoice() for _ in range(self.choices)]
        body = self._head | {"object": self.whole_object}
        async for event in run:
            if isinstance(event, Delta):
                parts[event.choice].add(event)
            elif isinstance(event, Finished):
                parts[event.choice].end = event
            elif isinstance(event, Summary):
                body |= self.body(parts, event)
        return body

    def body(self, parts: Sequence[WholeChoice], summary: Summary) -> Json:
        """Choices, usage and statistics."""
        choices = [self._whole_choice(index, part) for index, part in enumerate(parts)]
        return {"choices": choices, "usage": usage_body(summary.usage), **summary.statistics}

    def _whole_choice(self, index: int, part: WholeChoice) -> Json:
        assert part.end is not None, "every choice is finished before the summary"
        ended = {"finish_reason": part.end.reason, "stop_reason": part.end.stop}
        choice = {"index": index, **self.message(index, part), **ended}
        return choice | {"token_details": token_details(part.tokens)} if self._token_details else choice


def usage_body(usage: Usage) -> Json:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def token_details(tokens: Sequence[TokenInfo]) -> list[Json]:
    """Where each token came from, for the page."""
    return [{"text": token.text, "source": token.arm, "round": token.round} for token in tokens]
