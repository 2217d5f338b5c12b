"""Chat completions in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forerun.serve.chat_events import ChatRun, Delta, TokenInfo, ToolCallDelta
from forerun.serve.dialects.transport import Json
from forerun.serve.routes.chat_request import ChatRequest
from forerun.serve.routes.chunks import CompletionEncoder, WholeChoice


class ChatEncoder(CompletionEncoder):
    """A choice has deltas in a stream, and one message in a whole answer."""

    id_prefix, chunk_object, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, run: ChatRun, request: ChatRequest, begun: str) -> None:
        """`begun`: text before the answer's own."""
        super().__init__(run, request, request.n or 1, bool(request.logprobs))
        self._begun = begun

    def start(self) -> Iterator[Json]:
        """The role comes first."""
        for choice in range(self.choices):
            yield self.chunk(choice, {"delta": {"role": "assistant", "content": self._begun}})

    def said(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def said_nothing(self) -> Json:
        return {"delta": {}}

    def delta(self, delta: Delta) -> Json | None:
        if delta.tool_call is not None:
            return {"delta": {"tool_calls": [_call(delta.tool_call)]}}
        if delta.reasoning:
            return {"delta": {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}}
        return super().delta(delta)

    def logprobs(self, choice: int, tokens: Sequence[TokenInfo]) -> Json:  # noqa: ARG002 - of any choice
        """One entry per token, whatever chunk it is in."""
        entries = [
            _entry(token.text, token.data, token.logprob)
            | {"top_logprobs": [_entry(text, data, logprob) for _, text, data, logprob in token.top]}
            for token in tokens
        ]
        return {"content": entries, "refusal": None}

    def message(self, index: int, whole: WholeChoice) -> Json:
        content = self._begun + "".join(whole.content)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if whole.calls:
            message |= {"content": content or None, "tool_calls": whole.calls}
        if reasoning := "".join(whole.reasoning):
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return {"message": message, "logprobs": self.logprobs(index, whole.tokens) if self.with_logprobs else None}


def _entry(text: str, data: bytes, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def _call(call: ToolCallDelta) -> Json:
    """Id, type and name come once, with the first delta of a call."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
