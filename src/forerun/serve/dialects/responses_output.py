"""The items of an answer in the Responses API: each opens, grows and closes with events of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from forerun.serve.chat_events import TokenInfo
from forerun.serve.dialects.transport import Json


class OutputItem(Protocol):
    """One item on its way. Events have no sequence number yet; `done` is the item as it stays in the answer."""

    def opened(self) -> Iterator[Json]: ...

    def closed(self, status: str) -> Iterator[Json]: ...

    def done(self, status: str) -> Json: ...


class MessageItem:
    """Text for the user: a message of one part."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self._place = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._id, self._index = item_id, output_index
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def opened(self) -> Iterator[Json]:
        """The item, then its only part, both empty."""
        item = {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": "response.content_part.added", **self._place, "part": _text_part("", [])}

    def grow(self, text: str, tokens: Sequence[TokenInfo]) -> Iterator[Json]:
        """More of the text."""
        logprobs = [_logprob(token) for token in tokens if token.logprob is not None]
        self._text.append(text)
        self._logprobs += logprobs
        yield {"type": "response.output_text.delta", **self._place, "delta": text, "logprobs": logprobs}

    def closed(self, status: str) -> Iterator[Json]:
        """The text, the part and the item as a whole."""
        text = "".join(self._text)
        yield {"type": "response.output_text.done", **self._place, "text": text, "logprobs": self._logprobs}
        yield {"type": "response.content_part.done", **self._place, "part": _text_part(text, self._logprobs)}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.done(status)}

    def done(self, status: str) -> Json:
        """The message."""
        part = _text_part("".join(self._text), self._logprobs)
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [part]}


class ReasoningItem:
    """What the model thinks. Who asks for a summary gets the text as one: there is nobody to write a shorter one."""

    def __init__(self, item_id: str, output_index: int, as_summary: bool) -> None:
        self._id, self._index, self._as_summary = item_id, output_index, as_summary
        index = "summary_index" if as_summary else "content_index"
        self._place = {"item_id": item_id, "output_index": output_index, index: 0}
        self._part_event = "response.reasoning_summary_part" if as_summary else "response.content_part"
        self._text_event = "response.reasoning_summary_text" if as_summary else "response.reasoning_text"
        self._text: list[str] = []

    def opened(self) -> Iterator[Json]:
        """The item and its only part, both empty."""
        item = {"id": self._id, "type": "reasoning", "status": "in_progress", "summary": []}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}
        yield {"type": f"{self._part_event}.added", **self._place, "part": self._part("")}

    def grow(self, text: str) -> Iterator[Json]:
        """More thoughts."""
        self._text.append(text)
        yield {"type": f"{self._text_event}.delta", **self._place, "delta": text}

    def closed(self, status: str) -> Iterator[Json]:
        """The text, the part and the item as a whole."""
        text = "".join(self._text)
        yield {"type": f"{self._text_event}.done", **self._place, "text": text}
        yield {"type": f"{self._part_event}.done", **self._place, "part": self._part(text)}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.done(status)}

    def done(self, status: str) -> Json:
        """The item, in which a summary has its place even where there is none."""
        item: Json = {"id": self._id, "type": "reasoning", "status": status, "summary": []}
        item["summary" if self._as_summary else "content"] = [self._part("".join(self._text))]
        return item

    def _part(self, text: str) -> Json:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}


class CallItem:
    """A function call."""

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str, namespace: str | None) -> None:
        self._id, self._index = item_id, output_index
        self._named: Json = {"call_id": call_id, "name": name}
        if namespace is not None:
            self._named["namespace"] = namespace
        self._arguments: list[str] = []

    def opened(self) -> Iterator[Json]:
        """The item, without arguments."""
        item = {"id": self._id, "type": "function_call", "status": "in_progress", **self._named, "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": item}

    def grow(self, arguments: str) -> Iterator[Json]:
        """More of its arguments."""
        if arguments:
            self._arguments.append(arguments)
            place = {"item_id": self._id, "output_index": self._index}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}

    def closed(self, status: str) -> Iterator[Json]:
        """The arguments and the item as a whole."""
        place = {"item_id": self._id, "output_index": self._index, "name": self._named["name"]}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": "".join(self._arguments)}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.done(status)}

    def done(self, status: str) -> Json:
        """The call."""
        arguments = "".join(self._arguments)
        return {"id": self._id, "type": "function_call", "status": status, **self._named, "arguments": arguments}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _logprob(token: TokenInfo) -> Json:
    top = [{"token": text, "bytes": list(data), "logprob": logprob} for _, text, data, logprob in token.top]
    return {"token": token.text, "bytes": list(token.data), "logprob": token.logprob, "top_logprobs": top}
