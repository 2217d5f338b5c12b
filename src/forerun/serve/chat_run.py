"""Answers under way: the events of all choices as they come, then one summary."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass

from forerun.serve.answer_reader import AnswerReader
from forerun.serve.chat_events import ChatEvent, Delta, Finished, Summary, Usage
from forerun.serve.engine_client import Answer, Ended
from forerun.serve.errors import ApiError
from forerun.serve.statistics import statistics
from forerun.text.answer import AnswerText


@dataclass(slots=True)
class Choice:
    """One answer, who reads it, and how it ended."""

    answer: Answer
    sink: AnswerText
    reader: AnswerReader
    stop_ids: Collection[int] = ()  # that the request names itself; the model's own end is no news
    ended: Ended | None = None

    async def events(self) -> AsyncGenerator[Delta | Finished, None]:
        """What it says, and that it is over."""
        async for item in self.answer:
            if isinstance(item, Ended):
                self.ended = item
                for delta in self.reader.end(item.tail):
                    yield delta
                if item.reason == "cancelled":
                    break
                named = item.stop if item.stop in self.stop_ids else None
                yield self.reader.finished(item, named if self.sink.stop is None else self.sink.stop)
                return
            for delta in self.reader.read(item):
                yield delta
        raise ApiError(503, "The answer was stopped before its end.")


class Run:
    """A `ChatRun` over the engine's answers."""

    def __init__(self, model: str, prompt_tokens: int, choices: Sequence[Choice], warnings: Sequence[str] = ()) -> None:
        self.id, self.created, self.model = uuid.uuid4().hex, int(time.time()), model
        self.prompt_tokens, self.choices, self._warnings = prompt_tokens, choices, warnings

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        events = self.choices[0].events() if len(self.choices) == 1 else _merged(self.choices)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
            yield self._summary()
        finally:
            await asyncio.shield(asyncio.ensure_future(self.close()))

    async def close(self) -> None:
        """Stop what still runs."""
        for choice in self.choices:
            await choice.answer.close()

    def _summary(self) -> Summary:
        ended = [choice.ended for choice in self.choices if choice.ended is not None]
        usage = Usage(
            prompt=self.prompt_tokens,
            completion=sum(end.response.completion_tokens for end in ended),
            reasoning=sum(choice.reader.reasoning_tokens for choice in self.choices),
        )
        return Summary(usage, statistics(ended, self.prompt_tokens, self._warnings))


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[Delta | Finished, None]:
    """Events of several choices in the order they come. The first failure ends all of them."""
    queue: asyncio.Queue[Delta | Finished | Exception | None] = asyncio.Queue(2 * len(choices))

    async def feed(choice: Choice) -> None:
        try:
            async for event in choice.events():
                await queue.put(event)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads the queue
            await queue.put(error)

    feeders = [asyncio.ensure_future(feed(choice)) for choice in choices]
    try:
        running = len(feeders)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for feeder in feeders:
            feeder.cancel()
