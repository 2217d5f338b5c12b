"""Answers under way: the events of all choices as they come, then one summary."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from forerun.proof import Proof
from forerun.serve.chat_events import ChatEvent, Delta, Finished, PromptProgress, Summary, Usage
from forerun.serve.chat_job import GenerationWish
from forerun.serve.choice import Choice
from forerun.serve.engine_client import Ended
from forerun.serve.generation import PromptToRun, make_work
from forerun.serve.model_service import LoadedModel, ModelService
from forerun.serve.proving import Prover
from forerun.serve.request_log import note_answer
from forerun.serve.statistics import statistics


class EngineChatRun:
    """A `ChatRun` over the engine's answers."""

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        choices: Sequence[Choice],
        warnings: Sequence[str] = (),
        prover: Prover | None = None,
        each: int = 1,
    ) -> None:
        """`each`: choices of one prompt, which stand together."""
        self.id, self.created, self.model = uuid.uuid4().hex, int(time.time()), model
        self.prompt_tokens, self.choices = prompt_tokens, choices
        self._warnings, self._prover = warnings, prover
        self._failed, self._each = False, each

    async def __aiter__(self) -> AsyncIterator[ChatEvent]:
        events = self.choices[0].events() if len(self.choices) == 1 else _merged(self.choices)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
            ended = [choice.ended for choice in self.choices if choice.ended is not None]
            proof = None if self._prover is None else await self._prover.prove(ended)
            yield self._summary(ended, proof)
        except Exception:
            self._failed = True
            raise
        finally:
            await asyncio.shield(asyncio.ensure_future(self.close()))

    async def close(self) -> None:
        """Stop what still runs."""
        for choice in self.choices:
            await choice.answer.close()
        if self._prover is not None:
            await self._prover.close()

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(
            prompt=self.prompt_tokens,
            completion=sum(choice.progress.tokens for choice in self.choices),
            reasoning=sum(choice.reasoning_tokens for choice in self.choices),
            cached=self._cached,
        )

    @property
    def _cached(self) -> int:
        """Tokens of prompts that no choice has read. Choices of one prompt find what the first of them has read."""
        found = [0 if choice.ended is None else choice.ended.response.cached_tokens for choice in self.choices]
        return sum(min(found[first : first + self._each]) for first in range(0, len(found), self._each))

    def figures(self, began: float) -> dict[str, Any]:
        """For the log."""
        usage, steps = self.usage, [choice.progress for choice in self.choices]
        rounds, begun = sum(step.rounds for step in steps), [step.first for step in steps if step.first is not None]
        rates = [c.ended.response.tokens_per_second if c.ended else c.progress.tokens_per_second for c in self.choices]
        unfinished = "error" if self._failed else "cancelled"
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
            "first_token_seconds": min(begun) - began if begun else None,
            "tokens_per_second": sum(rates) or None,
            "tokens_per_round": 1 + sum(step.accepted for step in steps) / rounds if rounds else None,
            "finish_reason": ",".join(dict.fromkeys(choice.finish or unfinished for choice in self.choices)),
        }

    def _summary(self, ended: Sequence[Ended], proof: Proof | None) -> Summary:
        usage = self.usage
        return Summary(usage, statistics(ended, usage.prompt, usage.cached, self._warnings, proof))


async def start_run(
    models: ModelService,
    model: LoadedModel,
    wish: GenerationWish,
    prompts: Sequence[PromptToRun],
    param: str,
    warnings: Sequence[str] = (),
) -> EngineChatRun:
    """Queue all choices of all prompts, or none; `param`: the field that the prompts came in."""
    silent = wish.max_tokens == 0  # the engine says one token at least, and nobody hears it
    wish = replace(wish, max_tokens=1, min_tokens=0) if silent else wish
    decodings = [(prompt, make_work(model, wish, prompt, param)) for prompt in prompts]
    work = [(prompt, one) for prompt, all_of_it in decodings for one in all_of_it[: wish.n]]
    plain = [one for _, all_of_it in decodings for one in all_of_it[wish.n :]]
    answers = await models.engine.start([one for _, one in work])
    choices = [
        Choice(index, answer, one.sink, prompt.parser(), model.token_bytes, wish.stop_token_ids, silent=silent)
        for index, (answer, (prompt, one)) in enumerate(zip(answers, work, strict=True))
    ]
    prover = None
    if plain:
        prover = Prover(models.engine, models.name, model.token_bytes, [one for _, one in work], plain)
    run = EngineChatRun(models.name, sum(len(prompt.ids) for prompt in prompts), choices, warnings, prover, wish.n)
    note_answer(run)
    return run


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[PromptProgress | Delta | Finished, None]:
    """Events of several choices in the order they come. The first failure ends all of them."""
    queue: asyncio.Queue[PromptProgress | Delta | Finished | Exception | None] = asyncio.Queue(2 * len(choices))

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
