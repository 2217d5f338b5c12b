"""What fails, fails alone, and its client gets a clean error; a drafter that fails costs speed only."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from engines import NoText, Scripted, decoder, request, run
from local_engines import ask, language_model, serving, tokens, work
from tiny import tiny_model

from forerun.engine.drafters import ROUNDS
from forerun.language_model import LanguageModel
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output
from forerun.serve.engine_room import DeviceLost
from forerun.serve.errors import ApiError

WISHES = [request([5 + n, 6, 7, 8] * 6, max_tokens=12, draft="lookup") for n in range(4)]
BAD = 1  # whose fault it is


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


@pytest.fixture(scope="module")
def alone(target: Decoder) -> list[list[int]]:
    return [run(language_model(target).engine, wish)[0].answer for wish in WISHES]


class Unread(NoText):
    """A sink that fails at its third token."""

    left = 2

    def push(self, token: int) -> tuple[str, bool]:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device", "/secret/path")
        return super().push(token)


class Unflushed(NoText):
    """A sink that fails at the end."""

    def flush(self) -> str:
        raise ValueError("half a character")


def break_passes(model: LanguageModel, failing: Any) -> None:
    """Passes in which the bad request has rows, of its answer, fail as told."""
    target = model.engine.runner.target
    usual = target.forward

    def forward(batch: Any) -> Output:
        bad = [s for s in model.engine.scheduler.active if s.request is WISHES[BAD] and len(s.answer) > 3]
        pages = [sequence.cache.pages[0] for sequence in bad]
        first = batch.rows.block_tables[0][:, 0].tolist()
        mine = [index for index, page in enumerate(first) if page in pages]
        return failing(usual, batch, mine) if mine else usual(batch)

    target.forward = forward  # type: ignore[method-assign]


def raises(error: Exception) -> Any:
    def failing(usual: Any, batch: Any, mine: list[int]) -> Output:
        raise error

    return failing


def not_a_number(usual: Any, batch: Any, mine: list[int]) -> Output:
    output: Output = usual(batch)
    logits = output.logits.clone()
    for index in mine:
        logits[batch.start(index) : int(batch.rows.query_start[index + 1])] = float("nan")
    return Output(logits, output.features)


def others_are_well(target: Decoder, alone: list[list[int]], sink: Any, failing: Any) -> ApiError:
    async def main() -> ApiError:
        model = language_model(target)
        usual = model.engine.runner.target.forward
        if failing is not None:
            break_passes(model, failing)
        try:
            async with serving(model) as local:
                asked = [ask(local, wish, sink if n == BAD else None) for n, wish in enumerate(WISHES)]
                found = await asyncio.gather(*asked, return_exceptions=True)
                assert local.state().status == "ready"
                error = found.pop(BAD)
                assert isinstance(error, ApiError), error
                assert [tokens(one) for one in found] == alone[:BAD] + alone[BAD + 1 :]  # type: ignore[arg-type]
                return error
        finally:
            model.engine.runner.target.forward = usual  # type: ignore[method-assign]

    return asyncio.run(main())


@pytest.mark.parametrize("sink", [Unread, Unflushed])
def test_a_sink(target: Decoder, alone: list[list[int]], sink: Any) -> None:
    error = others_are_well(target, alone, sink(), None)
    assert error.status == 500 and "secret" not in error.message


@pytest.mark.parametrize(
    ("failing", "status", "words"),
    [
        (raises(RuntimeError("at 0x7f00dead")), 500, "failed"),
        (raises(torch.OutOfMemoryError("tried to allocate")), 503, "out of memory"),
        (raises(RuntimeError("DefaultCPUAllocator: can't allocate memory")), 503, "out of memory"),
        (not_a_number, 500, "not a number"),
    ],
)
def test_a_pass(target: Decoder, alone: list[list[int]], failing: Any, status: int, words: str) -> None:
    error = others_are_well(target, alone, None, failing)
    assert error.status == status and words in error.message and "0x" not in error.message


def test_a_drafter(target: Decoder, alone: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """It is switched off for that request, loudly, and the tokens are the same."""

    def main() -> Any:
        model = language_model(target)

        def script(text: list[int], depth: int) -> list[int]:
            if text[0] == WISHES[BAD].prompt[0]:
                raise KeyError("lost")
            return text[-depth:]

        model.engine.drafters.texts["lookup"] = Scripted(script)

        async def ask_all() -> Any:
            async with serving(model) as local:
                return await asyncio.gather(*(ask(local, wish) for wish in WISHES))

        return asyncio.run(ask_all())

    with caplog.at_level(logging.WARNING, "forerun"):
        found = main()
    assert [tokens(one) for one in found] == alone
    warned = [one[1].response.warnings for one in found]
    assert [len(some) for some in warned] == [int(n == BAD) for n in range(len(WISHES))]
    assert "drafter lookup failed" in warned[BAD][0]
    assert sum("switched off" in record.message for record in caplog.records) == 1


def test_a_drafter_that_is_not_there(target: Decoder) -> None:
    """The client learns which there are, and not where the server looked for it."""

    async def main() -> None:
        model = language_model(target)
        model.engine.drafters.unavailable["mtp"] = "/a/secret/folder has no MTP head"
        async with serving(model) as local:
            with pytest.raises(ApiError) as refused:
                await ask(local, request([5, 6, 7], draft="mtp"))
        assert (refused.value.status, refused.value.param) == (400, "speculative")
        assert "lookup" in refused.value.message and "secret" not in refused.value.message

    asyncio.run(main())


def test_a_drafter_that_is_never_right_is_one_loud_line(target: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    model = language_model(target)
    model.engine.drafters.texts["lookup"] = Scripted(lambda text, depth: [4] * depth)
    wishes = [
        request([5 + n, 6, 7], max_tokens=150, draft="lookup", draft_tokens=2, suppress=frozenset({4}))
        for n in range(4)
    ]

    async def main() -> None:
        async with serving(model) as local:
            await ask(local, wishes[0])
            assert ROUNDS > 149 and not local.state().warnings
            await asyncio.gather(*(ask(local, wish) for wish in wishes))
            assert len(local.state().warnings) == 1 and "drafter lookup" in local.state().warnings[0]
            assert local.state().accepted_share == 0 and local.state().tokens_per_round == 1
            assert local.state().tokens_per_second > 0

    with caplog.at_level(logging.WARNING, "forerun"):
        asyncio.run(main())
    assert sum("almost never right" in record.message for record in caplog.records) == 1


def test_a_device_that_is_lost_breaks_the_engine(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors of a GPU nothing will ever run on it again: to call that ready would be a lie."""

    def gone(device: torch.device, error: Exception) -> None:
        raise DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr("forerun.serve.engine_room.check_device", gone)

    async def main() -> None:
        async with serving(language_model(target)) as local:
            found = await asyncio.gather(*(ask(local, w, Unread()) for w in WISHES), return_exceptions=True)
            assert [getattr(error, "code", None) for error in found] == ["engine_broken"] * len(WISHES)
            assert local.state().status == "broken"

    asyncio.run(main())


def test_a_loop_that_is_gone(target: Decoder) -> None:
    """Nobody reads any more: its sequences are released, others are served."""
    model = language_model(target)

    async def main() -> None:
        async with serving(model) as local:

            async def leave() -> None:
                await local.start([work(request([5, 6, 7], max_tokens=200)) for _ in range(3)])

            await asyncio.to_thread(asyncio.run, leave())
            assert len(tokens(await ask(local, WISHES[0]))) == 12
            while model.engine.scheduler.active:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_more_answers_than_there_is_ever_room_for_are_no_matter_of_waiting(target: Decoder) -> None:
    """Clients try again after a 429: they would do so for ever."""

    async def main() -> None:
        async with serving(language_model(target, max_sequences=2), max_running=3, max_queue=2) as local:
            for count, status in ((5, 400), (4, 0)):
                found = await asyncio.gather(local.start([work(WISHES[0])] * count), return_exceptions=True)
                assert getattr(found[0], "status", 0) == status, found
            for answer in found[0] if isinstance(found[0], list) else ():
                await answer.close()

    asyncio.run(main())
