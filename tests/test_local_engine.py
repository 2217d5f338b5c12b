"""The engine as a server sees it: many answers at once, each what it would be alone, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from engines import CONTEXT, NoText, decoder, request, run
from local_engines import ask, language_model, read, serving, settled, tokens, until, work
from tiny import tiny_model

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.models.layers.decoder import Decoder
from forerun.sample.parameters import SamplingParams
from forerun.serve.engine_client import Ended, PromptRead
from forerun.serve.engine_room import EngineRoom
from forerun.serve.errors import ApiError
from forerun.serve.local_engine import LocalEngine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


def mixed(count: int, tokens: int = 24) -> list[Request]:
    """Requests of several kinds, prompts of one chunk and of several."""
    arms = ["off", "lookup", "auto"]
    return [
        request(
            [5 + n, 6, 7, 8 + n % 3] * (1 + n % 7),
            max_tokens=tokens - n % 5,
            draft=arms[n % 3],
            temperature=0.0 if n % 2 else 0.9,
            seed=n,
        )
        for n in range(count)
    ]


def plain(target: Decoder, wishes: list[Request]) -> list[list[int]]:
    """What each gets alone."""
    machine = language_model(target).engine
    return [run(machine, wish)[0].answer for wish in wishes]


def test_twenty_requests_into_room_for_two(target: Decoder) -> None:
    wishes = mixed(20)
    alone = plain(target, wishes)

    async def main(**options: Any) -> None:
        model = language_model(target, pages=18)
        async with serving(model, **options) as local:
            found = await asyncio.gather(*(ask(local, wish) for wish in wishes))
            assert [tokens(one) for one in found] == alone
            assert [one[1].response.tokens for one in found] == alone
            assert max(one[1].queue_seconds for one in found) > 0
            assert all(one[1].reason == "length" and one[1].first_token_seconds > 0 for one in found)

    asyncio.run(main())  # for want of pages
    asyncio.run(main(max_running=2))


def test_a_storm_of_sixty_four(target: Decoder) -> None:
    """Mixed requests in little memory, some given up: all others get the tokens and numbers they get alone."""
    dice, arms = random.Random(3), ["off", "lookup", "auto"]
    wishes = [
        Request(
            tuple(dice.randrange(4, 280) for _ in range(dice.randint(1, 50))),
            SamplingParams(temperature=dice.choice([0.0, 0.8]), seed=n, top_p=dice.choice([1.0, 0.9]))
            if n % 4
            else SamplingParams(repetition_penalty=1.3, logit_bias={17: 3.0}),
            max_tokens=dice.choice([5, 20, 40, 60]),
            stop_ids=frozenset(dice.sample(range(290), 6)),
            draft=arms[n % 3],
            logprobs=dice.choice([None, 0, 2]),
            prompt_logprobs=n % 7 == 0,
        )
        for n in range(64)
    ]

    async def one_by_one() -> list[Any]:
        async with serving(language_model(target)) as local:
            return [await ask(local, replace(wish, draft="off")) for wish in wishes]

    def numbers(found: Any) -> Any:
        return [(one.token, one.text, one.logprob) for one in found[0]], found[1].reason, found[1].stop

    async def all_at_once() -> None:
        async with serving(language_model(target, pages=90), max_running=24) as local:
            asked = [asyncio.create_task(ask(local, wish)) for wish in wishes]
            lost = [(await local.start([work(wish)]))[0] for wish in wishes[::5]]
            await asyncio.sleep(0.05)
            for answer in lost:
                await answer.close()
            assert [numbers(await task) for task in asked] == alone

    alone = [numbers(found) for found in asyncio.run(one_by_one())]
    assert {reason for _, reason, _ in alone} == {"stop", "length"} and any(stop is not None for *_, stop in alone)
    asyncio.run(all_at_once())


def test_an_answer_tells_where_its_tokens_came_from(target: Decoder) -> None:
    wish = request([5, 6, 7] * 8, max_tokens=40, draft="lookup")

    async def main() -> None:
        async with serving(language_model(target)) as local:
            emissions, ended = await ask(local, wish)
            response = ended.response
            assert "".join(e.text for e in emissions) + ended.tail == response.text
            assert sum(e.from_draft for e in emissions) == response.accepted > 0
            assert {e.arm for e in emissions if e.from_draft} == {"lookup"}
            assert {e.arm for e in emissions if not e.from_draft} == {""}
            rounds = [e.round for e in emissions]
            assert rounds[0] == 0 and rounds == sorted(rounds) and rounds[-1] == response.rounds
            assert local.state().arms == {arm: use.rounds for arm, use in response.arms.items()}

    asyncio.run(main())


def test_progress_of_a_prompt_goes_up_to_its_end(target: Decoder) -> None:
    """Only for the answer that asks."""
    wish = request([5, 6, 7] * 20, max_tokens=4)

    async def main() -> None:
        async with serving(language_model(target, chunk=16)) as local:
            asks, does_not = await local.start([replace(work(wish), progress=True), work(wish)])
            others = asyncio.create_task(read(does_not))
            items = [item async for item in asks]
            told = [item for item in items if isinstance(item, PromptRead)]
            assert items[: len(told)] == told and len(told) > 2
            assert [one.read for one in told] == sorted({one.read for one in told})
            assert told[-1].read == told[-1].total == 60
            assert [one.seconds for one in told] == sorted(one.seconds for one in told)
            assert not any(isinstance(item, PromptRead) for item in (await others)[0])

    asyncio.run(main())


def test_choices_are_queued_together_or_not_at_all(target: Decoder) -> None:
    good, bad = request([5, 6, 7], max_tokens=4), request([5] * 120, max_tokens=1)

    async def main() -> None:
        async with serving(language_model(target, pages=15)) as local:
            with pytest.raises(ApiError) as refused:
                await local.start([work(good), work(bad)])
            assert refused.value.status == 400 and refused.value.code == "context_length_exceeded"
            assert refused.value.facts == {"n_prompt_tokens": 120, "n_ctx": 120}, "what the cache holds"
            await settled(local)
            assert local.state().running == local.state().waiting == 0
            answers = await local.start([work(good), work(good)])
            assert tokens(await read(answers[0])) == tokens(await read(answers[1]))

    asyncio.run(main())


def test_a_prompt_longer_than_the_context(target: Decoder) -> None:
    async def main() -> None:
        async with serving(language_model(target)) as local:
            with pytest.raises(ApiError) as refused:
                await local.start([work(request([5] * CONTEXT))])
            error = refused.value
            assert (error.status, error.code) == (400, "context_length_exceeded")
            assert error.facts == {"n_prompt_tokens": CONTEXT, "n_ctx": CONTEXT}

    asyncio.run(main())


def test_two_hundred_that_are_given_up(target: Decoder) -> None:
    """At random moments: waiting, reading their prompts, in the middle of an answer; by `close` or by cancelling."""
    dice = random.Random(7)
    wishes = mixed(200, tokens=60)
    (alone,) = plain(target, [wishes[3]])

    async def leave(local: LocalEngine, wish: Request) -> None:
        (answer,) = await local.start([work(wish)])
        try:
            for _ in range(dice.randrange(6)):
                await anext(aiter(answer))
        finally:
            await answer.close()
            await answer.close()

    async def main() -> None:
        async with serving(language_model(target, pages=60), max_running=8) as local:
            tasks = []
            for wish in wishes:
                tasks.append(asyncio.create_task(leave(local, wish)))
                if dice.random() < 0.3:  # before anything is awaited: the newest task at least is not done
                    dice.choice([task for task in tasks if not task.done()]).cancel()
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.random() * 0.003)
            await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(task.cancelled() for task in tasks) > 10
            assert tokens(await ask(local, wishes[3])) == alone

    asyncio.run(main())


def test_a_slow_reader_pauses_alone(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.serve.local_answer.MANY", 8)
    monkeypatch.setattr("forerun.serve.local_answer.FEW", 2)
    wishes = [request([5, 6, 7], max_tokens=150), request([8, 9, 10], max_tokens=100)]
    alone = plain(target, wishes)

    async def main() -> None:
        async with serving(language_model(target)) as local:
            (slow,) = await local.start([work(wishes[0])])
            assert tokens(await ask(local, wishes[1])) == alone[1]
            assert slow.sequence is not None and 8 < len(slow.sequence.answer) < 30
            assert tokens(await read(slow)) == alone[0]

    asyncio.run(main())


class Gate(NoText):
    """Holds the engine's thread at its second token until it is opened."""

    def __init__(self) -> None:
        import threading

        self.reached, self.opened, self.left = threading.Event(), threading.Event(), 1

    def push(self, token: int) -> tuple[str, bool]:
        self.left -= 1
        if self.left < 0:
            self.reached.set()
            assert self.opened.wait(30)
        return super().push(token)


def test_a_full_queue_refuses(target: Decoder) -> None:
    gate, wish = Gate(), request([5, 6, 7], max_tokens=4)

    async def main() -> None:
        async with serving(language_model(target), max_running=1, max_queue=2) as local:
            running = await local.start([work(wish, gate)])
            await until(gate.reached.is_set)
            waiting = [(await local.start([work(wish)]))[0] for _ in range(2)]
            assert (local.state().running, local.state().waiting) == (1, 2)
            with pytest.raises(ApiError) as refused:
                await local.start([work(wish)])
            assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1
            gate.opened.set()
            for answer in [*running, *waiting]:
                await read(answer)
            await ask(local, wish)

    asyncio.run(main())


def test_who_waits_too_long_fails_and_leaves_the_queue(target: Decoder) -> None:
    gate, wish = Gate(), request([5, 6, 7], max_tokens=4)

    async def main() -> None:
        async with serving(language_model(target), max_running=1, queue_timeout=0.05) as local:
            (running,) = await local.start([work(wish, gate)])
            await until(gate.reached.is_set)
            with pytest.raises(ApiError) as failed:
                await ask(local, wish)
            assert (failed.value.status, failed.value.code) == (503, "queue_timeout")
            gate.opened.set()
            await read(running)

    asyncio.run(main())


def test_an_answer_that_takes_too_long(target: Decoder) -> None:
    gate, wish = Gate(), request([5, 6, 7], max_tokens=4)

    async def main() -> None:
        async with serving(language_model(target), request_timeout=0.05) as local:
            (answer,) = await local.start([work(wish, gate)])
            found: list[Any] = []
            with pytest.raises(ApiError) as failed:
                async for item in answer:
                    found.append(item)
            assert (failed.value.status, failed.value.code) == (504, "request_timeout")
            assert len(found) == 1, "what came before is read first"
            gate.opened.set()

    asyncio.run(main())


def test_draining(target: Decoder) -> None:
    """Answers that run are finished, those that take too long are stopped, new ones refused."""
    gate, wish = Gate(), request([5, 6, 7], max_tokens=4)

    async def main(timeout: float) -> Any:
        gate.__init__()  # type: ignore[misc]
        local = LocalEngine()
        with pytest.raises(ApiError, match="loading") as refused:
            await local.start([work(wish)])
        assert refused.value.status == 503 and local.state().status == "loading"
        local.open(language_model(target))
        assert local.state().status == "ready"
        (answer,) = await local.start([work(wish, gate)])
        await until(gate.reached.is_set)
        draining = asyncio.create_task(local.drain(timeout))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="shutting down"):
            await local.start([work(wish)])
        assert local.state().status == "draining"
        if timeout > 1:
            gate.opened.set()
        else:
            asyncio.get_running_loop().call_later(0.1, gate.opened.set)
        try:
            return await read(answer)
        finally:
            await draining
            assert local.model is not None
            local.model.engine.pool.check([])

    assert len(tokens(asyncio.run(main(20)))) == 4
    with pytest.raises(ApiError, match="shutting down"):
        asyncio.run(main(0.02))


def test_an_engine_whose_thread_dies_is_broken(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, wish = Gate(), request([5, 6, 7], max_tokens=4)

    def dies(self: EngineRoom) -> None:
        raise SystemError("no way on")

    async def main() -> None:
        async with serving(language_model(target)) as local:
            answers = [(await local.start([work(wish, sink)]))[0] for sink in (gate, None, None)]
            await until(gate.reached.is_set)
            assert local._room is not None
            monkeypatch.setattr(local._thread, "_delivered", partial(dies, local._room))
            gate.opened.set()
            for answer in answers:
                with pytest.raises(ApiError) as failed:
                    await read(answer)
                assert (failed.value.status, failed.value.code) == (500, "engine_broken")
            assert local.state().status == "broken"
            with pytest.raises(ApiError, match="broken"):
                await local.start([work(wish)])

    asyncio.run(main())


def test_a_round_that_fails_as_a_whole(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was in it fails and others are served; when it goes on like that, the engine is broken."""
    wish, usual = request([5, 6, 7], max_tokens=4), Engine.step
    failing = iter([False, True, *[False] * 20])

    def step(self: Engine) -> None:
        if next(failing, True):
            raise LookupError("whose fault?")
        usual(self)

    monkeypatch.setattr(Engine, "step", step)

    async def main() -> None:
        async with serving(language_model(target)) as local:
            for code in ("generation_failed", None):
                found = (await asyncio.gather(ask(local, wish), return_exceptions=True))[0]
                assert getattr(found, "code", None) == code and local.state().status == "ready"
            for _ in failing:
                pass
            codes = []
            while local.state().status == "ready":
                found = (await asyncio.gather(ask(local, wish), return_exceptions=True))[0]
                codes.append(getattr(found, "code", None))
            assert codes == ["engine_broken"], "a request that cannot even begin fails with the engine"

    asyncio.run(main())


def test_closing_fails_whoever_still_reads(target: Decoder) -> None:
    async def main() -> None:
        local = LocalEngine()
        local.open(language_model(target))
        (answer,) = await local.start([work(request([5, 6, 7], max_tokens=200))])
        await local.close()
        with pytest.raises(ApiError, match="shutting down"):
            await read(answer)

    asyncio.run(main())


def test_no_more_places_than_the_engine_has(target: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    """A device has slots for so many, whatever the settings say."""
    model = language_model(target, max_sequences=2)

    async def main() -> None:
        async with serving(model, max_running=5, max_queue=0) as local:
            await asyncio.gather(*(ask(local, wish) for wish in mixed(2)))
            with pytest.raises(ApiError, match="waiting"):
                await asyncio.gather(*(ask(local, wish) for wish in mixed(3)))
            for answer in list(local._answers):
                await answer.close()

    asyncio.run(main())
    assert model.engine.scheduler.max_sequences == 2 and "at most 2" in caplog.text


def test_loading_beside_the_loop(target: Decoder) -> None:
    wish = request([5, 6, 7], max_tokens=4, draft="auto")

    async def main() -> None:
        local = LocalEngine()
        model = await local.load(lambda: language_model(target))
        assert local.state().status == "ready" and model.engine.warm and local.model is model
        assert gc.get_freeze_count() > 0  # collections leave what was loaded alone
        assert isinstance((await ask(local, wish))[1], Ended)
        await local.close()
        assert gc.get_freeze_count() == 0
        broken = LocalEngine()
        with pytest.raises(ZeroDivisionError):
            await broken.load(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        assert broken.state().status == "broken"

    asyncio.run(main())
