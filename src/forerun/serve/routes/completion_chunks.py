"""Text completions in OpenAI's older form: chunks, whole answers, and lists of log probabilities."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

from forerun.serve.chat_events import ChatEvent, Delta, Finished, TokenInfo
from forerun.serve.completion_service import CompletionRun
from forerun.serve.routes.chat_chunks import Shape, WholeChoice, token_details, usage_body


class LegacyLogprobs:
    """Log probabilities of one choice's tokens, and where in its text each begins: some share a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """Four lists of the same length. A prompt's first token follows nothing: its entries are null."""
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": [self._next_offset(token.data) for token in tokens],
        }

    def _next_offset(self, data: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(data))
        return offset


def _top(token: TokenInfo) -> dict[str, float] | None:
    """The likeliest texts and the token's own; of several tokens with the same text the likeliest counts."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for text, value in [(text, value) for _, text, _, value in token.top] + [(token.text, token.logprob)]:
        top[text] = max(value, top.get(text, value))
    return top


class TextChunks:
    """The chunks of one stream."""

    def __init__(self, run: CompletionRun, shape: Shape) -> None:
        self._run, self._shape = run, shape
        self._waiting: dict[int, list[TokenInfo]] = {}
        self._logprobs: defaultdict[int, LegacyLogprobs] = defaultdict(LegacyLogprobs)
        self._echoed: set[int] = set()
        self._head = _head(run, shape)

    async def of(self, events: AsyncIterable[ChatEvent]) -> AsyncIterator[dict[str, Any]]:
        """Text, ends, and the usage; see `Chunks`."""
        last: dict[str, Any] | None = None
        async for event in events:
            if isinstance(event, Delta | Finished) and self._shape.echo and event.choice not in self._echoed:
                self._echoed.add(event.choice)  # not before the first event: the prompt has been read by then
                tokens = self._run.prompt_tokens(event.choice) if self._shape.logprobs else []
                yield self._chunk(event.choice, self._run.prompt_text(event.choice), tokens)
            if isinstance(event, Delta):
                self._waiting.setdefault(event.choice, []).extend(event.tokens)
                if event.content:
                    yield self._chunk(event.choice, event.content, self._waiting.pop(event.choice))
            elif isinstance(event, Finished):
                waiting = self._waiting.pop(event.choice, [])
                if waiting and (self._shape.logprobs or self._shape.token_details):
                    yield self._chunk(event.choice, "", waiting)
                if last is not None:
                    yield last
                last = self._chunk(event.choice, "", [], event)
            else:
                assert last is not None, "every choice is finished before the summary"
                if self._shape.include_usage:
                    yield last
                    last = self._head | {"choices": [], "usage": usage_body(event.usage)}
                yield last | dict(event.statistics)

    def _chunk(
        self, choice: int, text: str, tokens: Sequence[TokenInfo], end: Finished | None = None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
        if end is not None:
            body |= {"finish_reason": end.reason, "stop_reason": end.stop}
        if self._shape.logprobs and tokens:
            body["logprobs"] = self._logprobs[choice].of(tokens)
        if self._shape.token_details and tokens:
            body["token_details"] = token_details(tokens)
        chunk = self._head | {"choices": [body]}
        return chunk | {"usage": None} if self._shape.include_usage else chunk


def _head(run: CompletionRun, shape: Shape) -> dict[str, Any]:
    return {
        "id": f"cmpl-{run.run.id}",
        "object": "text_completion",
        "created": run.run.created,
        "model": run.run.model,
        "system_fingerprint": shape.fingerprint,
    }


async def whole_text(run: CompletionRun, shape: Shape, only_prompt: bool) -> dict[str, Any]:
    """The answer in one piece; `only_prompt`: what was generated is left out, only the prompt is rated."""
    parts = [WholeChoice() for _ in run.run.choices]
    body = _head(run, shape)
    async for event in run.run:
        if isinstance(event, Delta):
            parts[event.choice].add(event)
        elif isinstance(event, Finished):
            parts[event.choice].end = event
        else:
            usage = usage_body(event.usage)
            if only_prompt:
                parts = [WholeChoice(end=Finished(index, "length")) for index in range(len(parts))]
                usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            body["choices"] = [_choice(index, part, run, shape) for index, part in enumerate(parts)]
            body |= {"usage": usage, **event.statistics}
    return body


def _choice(index: int, part: WholeChoice, run: CompletionRun, shape: Shape) -> dict[str, Any]:
    assert part.end is not None, "every choice is finished before the summary"
    before = run.prompt_tokens(index) if shape.echo else []
    choice: dict[str, Any] = {
        "index": index,
        "text": (run.prompt_text(index) if shape.echo else "") + "".join(part.content),
        "logprobs": LegacyLogprobs().of([*before, *part.tokens]) if shape.logprobs else None,
        "finish_reason": part.end.reason,
        "stop_reason": part.end.stop,
    }
    if shape.token_details:
        choice["token_details"] = token_details(part.tokens)
    return choice
