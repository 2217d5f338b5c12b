"""Local engines for tests: a tiny model served by an engine's thread, driven by `asyncio.run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engines import engine
from tiny import tiny_tokenizer

from forerun.device import plan_machine
from forerun.engine.probe import ProbeResult
from forerun.engine.request import Request
from forerun.engine.sequence import Emission, TextSink
from forerun.language_model import LanguageModel
from forerun.models.layers.decoder import Decoder
from forerun.serve.engine_client import Ended, Work
from forerun.serve.local_answer import LocalAnswer
from forerun.serve.local_engine import LocalEngine
from forerun.serve.settings import ServeSettings
from forerun.text.answer import AnswerText

MACHINE = plan_machine("cpu", "float32", "none")
TOKENIZER = tiny_tokenizer()


def language_model(target: Decoder, **options: Any) -> LanguageModel:
    """A model whose cache and drafters are the test's: `options` are those of `engines.engine`."""
    return LanguageModel(
        engine=engine(target, **options),
        tokenizer=TOKENIZER,
        stop_ids=frozenset(),
        machine=MACHINE,
        probe=ProbeResult(()),
        load_seconds=0.0,
    )


@asynccontextmanager
async def serving(model: LanguageModel, **settings: Any) -> AsyncIterator[LocalEngine]:
    """Afterwards nothing is held: no page, no slot, no answer."""
    local = LocalEngine(ServeSettings(**settings))
    local.open(model)
    try:
        yield local
        await settled(local)
        if local.state().status != "broken":
            assert local.state().running == local.state().waiting == 0
            assert not model.engine.scheduler.active and not model.engine.scheduler.waiting
            assert model.engine.pool.free == model.engine.pool.count and local.state().cache_usage == 0
            model.engine.pool.check([])
    finally:
        await local.close()


async def settled(local: LocalEngine) -> None:
    """Everything that was asked of the engine's thread until now has been done."""
    assert local._thread is not None
    if not local._thread.closed:
        await asyncio.wrap_future(local._thread.call(lambda: None))


def work(request: Request, sink: TextSink | None = None) -> Work:
    return Work(request, sink or AnswerText(TOKENIZER, request.prompt, request.stop_strings))


async def ask(local: LocalEngine, request: Request, sink: TextSink | None = None) -> tuple[list[Emission], Ended]:
    """One answer from beginning to end."""
    (answer,) = await local.start([work(request, sink)])
    return await read(answer)


async def read(answer: LocalAnswer) -> tuple[list[Emission], Ended]:
    emissions: list[Emission] = []
    async for item in answer:
        if isinstance(item, Ended):
            return emissions, item
        assert item, "a round that gave nothing is not handed over"
        emissions += item
    raise AssertionError("an answer ends with `Ended` or an error")


async def until(condition: Any, steps: int = 2000) -> None:
    """Let others run until it holds; a hang fails."""
    for _ in range(steps):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came about")


def tokens(found: tuple[Sequence[Emission], Ended]) -> list[int]:
    return [emission.token for emission in found[0]]
