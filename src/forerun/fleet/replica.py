"""A replica: an engine in a process of its own that answers packed work. What runs the process is no matter here."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.engine.sequence import Logprob
from forerun.errors import ForerunError
from forerun.fleet.cache_diary import CacheDiary
from forerun.fleet.wire import Accepted, ChoiceEmissions, ChoiceEnded, ChoicePromptRead, Item, OtherModel, unpack
from forerun.media.parts import Kind, MediaPart, MediaPrompt, MediaReader
from forerun.serve.daemon_threads import beside
from forerun.serve.engine_client import Answer, Ended, PromptRead
from forerun.serve.errors import ApiError, try_later
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import LoadedModel, loaded_model
from forerun.serve.off_loop import OffLoop
from forerun.serve.readings import Readings
from forerun.serve.settings import ServeSettings

if TYPE_CHECKING:
    from forerun.language_model import LanguageModel

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """What a front must know of a model that sees or hears."""

    kinds: frozenset[Kind]
    placeholders: Mapping[int, Kind]
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class About:
    """What a front must know of the model, tokenizer included: it loads nothing itself."""

    tokenizer: Any
    context: int
    vocab: int
    stop_ids: frozenset[int]
    generation_defaults: Mapping[str, float]
    facts: Mapping[str, Any]
    media: MediaFacts | None
    fingerprint: str  # replicas that share it read the same tokens the same way


class Replica:
    """Use `load` first."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self.diary = CacheDiary()
        self.engine = LocalEngine(settings, lambda model: model.engine.pool.prefix.listen(self.diary.hear))
        self._off_loop = OffLoop(settings.template_timeout)
        self._loaded: LoadedModel | None = None
        self._about: About | None = None

    async def load(self, make: Callable[[], LanguageModel]) -> None:
        """Afterwards it answers."""
        loaded = loaded_model(await self.engine.load(make), self._settings)
        await beside(lambda: loaded.grammar_vocabulary)
        self._loaded, self._about = loaded, await beside(partial(_about, loaded))

    @property
    def about(self) -> About:
        """The model."""
        assert self._about is not None, "it is not loaded"
        return self._about

    async def answer(self, data: bytes, fingerprint: str) -> AsyncGenerator[Item, None]:
        """The choices of one request: `Accepted`, what they say, and how each ends. Leaving the iteration stops them.

        `fingerprint`: of the model that the work was made for.
        """
        loaded, answers = self._loaded, list[Answer]()
        assert loaded is not None, "it is not loaded"
        if fingerprint != self.about.fingerprint:
            yield OtherModel()
            return
        try:
            read = partial(unpack, data, loaded.tokenizer, lambda: loaded.grammar_vocabulary)
            answers += await self.engine.start(await self._off_loop.run(read, "response_format"))
        except ApiError as error:
            yield error
            return
        try:
            yield Accepted()
            events = _items(0, answers[0]) if len(answers) == 1 else _merged(answers)
            async with contextlib.aclosing(events):
                async for item in events:
                    yield item
        finally:
            for answer in answers:
                await answer.close()

    async def read_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt | ForerunError:
        """See `MediaReader.read`; what is wrong is given back, since it may be raised elsewhere only."""
        return await self._with_media(lambda reader: reader.read(ids, parts))

    async def count_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> int | ForerunError:
        """See `MediaReader.count`."""
        return await self._with_media(lambda reader: reader.count(ids, parts))

    async def _with_media(self, act: Callable[[MediaReader], Found]) -> Found | ForerunError:
        assert self._loaded is not None and self._loaded.media is not None, "fronts know what it reads"
        try:
            return await beside(partial(act, self._loaded.media))
        except ForerunError as error:
            return error

    def readings(self) -> Readings:
        """How it is."""
        return self.engine.readings()

    def check(self) -> None:
        """Raises when it will never answer again: another one has to take its place."""
        if self.engine.state().status == "broken":
            raise RuntimeError("the engine of this replica is broken")

    async def close(self) -> None:
        """The end; what still runs is stopped."""
        self._off_loop.close()
        await self.engine.close()


async def _items(choice: int, answer: Answer) -> AsyncGenerator[Item, None]:
    """All of one choice; it ends with `ChoiceEnded`."""
    asked: Sequence[Logprob] = ()
    try:
        async for item in answer:
            if isinstance(item, PromptRead):
                yield ChoicePromptRead(choice, item)
                continue
            if isinstance(item, Ended):
                yield ChoiceEnded(choice, item)
                return
            first, asked = not asked and bool(answer.prompt_logprobs), answer.prompt_logprobs
            yield ChoiceEmissions(choice, item, asked if first else ())
    except Exception as error:  # noqa: BLE001 - it goes to the caller
        yield ChoiceEnded(choice, error)
        return
    yield ChoiceEnded(choice, try_later(503, "The answer was stopped before its end."))


async def _merged(answers: Sequence[Answer]) -> AsyncGenerator[Item, None]:
    """Items of several choices in the order they come, until all are over."""
    queue: asyncio.Queue[Item] = asyncio.Queue(2 * len(answers))

    async def feed(choice: int, answer: Answer) -> None:
        async for item in _items(choice, answer):
            await queue.put(item)

    feeders = [asyncio.ensure_future(feed(choice, answer)) for choice, answer in enumerate(answers)]
    try:
        running = len(feeders)
        while running:
            item = await queue.get()
            running -= isinstance(item, ChoiceEnded)
            yield item
    finally:
        for feeder in feeders:
            feeder.cancel()


def _about(loaded: LoadedModel) -> About:
    reader = loaded.media
    media = None if reader is None else MediaFacts(reader.kinds, dict(reader.placeholders), reader.weight_bytes)
    spelled = loaded.tokenizer.backend_tokenizer.to_str() + str(loaded.tokenizer.chat_template)
    parts = (spelled, loaded.context, loaded.vocab, sorted(loaded.stop_ids), sorted(loaded.generation_defaults.items()))
    return About(
        tokenizer=loaded.tokenizer,
        context=loaded.context,
        vocab=loaded.vocab,
        stop_ids=loaded.stop_ids,
        generation_defaults=dict(loaded.generation_defaults),
        facts=dict(loaded.about),
        media=media,
        fingerprint=hashlib.sha256(repr(parts).encode()).hexdigest(),
    )
