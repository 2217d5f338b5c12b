"""Text completions in OpenAI's form, with lists of log probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from forerun.serve.chat_events import ChatEvent, Delta, Finished, TokenInfo
from forerun.serve.completion_service import CompletionRun
from forerun.serve.dialects.transport import Json
from forerun.serve.routes.chunks import CompletionEncoder, WholeChoice
from forerun.serve.routes.completion_request import CompletionRequest


class TextEncoder(CompletionEncoder):
    """A choice is text; with `echo` it begins with the prompt."""

    id_prefix, chunk_object, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, completion: CompletionRun, request: CompletionRequest) -> None:
        super().__init__(completion.run, request, len(completion.run.choices), request.logprobs is not None)
        self._completion, self._echo = completion, bool(request.echo)
        self._logprobs = [LegacyLogprobs() for _ in range(self.choices)]
        self._echoed: set[int] = set()

    def said(self, text: str) -> Json:
        return {"text": text}

    def events(self, event: ChatEvent) -> Iterator[Json]:
        if isinstance(event, Delta | Finished) and self._echo and event.choice not in self._echoed:
            self._echoed.add(event.choice)  # not before the first event: the prompt has been read by then
            said = self.said(self._completion.prompt_text(event.choice))
            if self.with_logprobs:
                said["logprobs"] = self.logprobs(event.choice, self._completion.prompt_tokens(event.choice))
            yield self.chunk(event.choice, said)
        yield from super().events(event)

    def logprobs(self, choice: int, tokens: Sequence[TokenInfo]) -> Json:
        return self._logprobs[choice].of(tokens)

    def message(self, index: int, whole: WholeChoice) -> Json:
        before = self._completion.prompt_tokens(index) if self._echo else []
        return {
            "text": (self._completion.prompt_text(index) if self._echo else "") + "".join(whole.content),
            "logprobs": self.logprobs(index, [*before, *whole.tokens]) if self.with_logprobs else None,
        }


class LegacyLogprobs:
    """Log probabilities of one choice's tokens, and where in its text each begins: some share a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, tokens: Sequence[TokenInfo]) -> Json:
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
