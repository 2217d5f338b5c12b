"""The two halves of a fleet without anything between them: what travels, what is lost, what is given up."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from engines import decoder, request
from local_engines import TOKENIZER, ask, language_model, tokens
from tiny import tiny_model

from forerun.engine.request import Request
from forerun.engine.sequence import Emission
from forerun.fleet import client
from forerun.fleet.client import FleetEngine, ReplicaLost
from forerun.fleet.replica import Replica
from forerun.fleet.routing import Route
from forerun.fleet.wire import ChoiceEmissions, Item, pack, unpack
from forerun.models.layers.decoder import Decoder
from forerun.sample.building import build_constraint
from forerun.sample.grammar import GrammarVocabulary, compile_grammar
from forerun.serve.engine_client import Ended, EngineState, PromptRead, Work
from forerun.serve.errors import ApiError
from forerun.serve.readings import Readings, together
from forerun.serve.settings import ServeSettings
from forerun.text.answer import AnswerText

STOP_IDS = frozenset({0, 2})
LONG = [5, 6, 7] * 10


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


class Near:
    """`Replicas` in this process. `lose`: before which item, by attempt, the replica is lost."""

    def __init__(self, replica: Replica, lose: dict[int, int] | None = None) -> None:
        self.replica, self.lose, self.routes = replica, lose or {}, list[Route]()

    async def answer(self, data: bytes, fingerprint: str, route: Route) -> AsyncGenerator[Item, None]:
        attempt = len(self.routes)
        self.routes.append(route)
        left = self.lose.get(attempt)
        async with aclosing(self.replica.answer(data, fingerprint)) as items:
            async for item in items:
                if left == 0:
                    raise ReplicaLost("killed")
                left = None if left is None else left - 1
                yield pickle.loads(pickle.dumps(item))


def run(target: Decoder, act: Callable[[FleetEngine, Near, Replica], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """A front and a replica of a tiny model; afterwards the replica holds nothing."""

    async def main() -> Any:
        replica = Replica(ServeSettings(**settings))
        model = language_model(target)
        model.stop_ids = STOP_IDS
        await replica.load(lambda: model)
        near = Near(replica)
        fleet = FleetEngine(near, ServeSettings(**settings))
        fleet.fingerprint = replica.about.fingerprint
        try:
            found = await act(fleet, near, replica)
            for _ in range(500):
                if replica.readings().state.running == 0 and model.engine.pool.free == model.engine.pool.count:
                    break
                await asyncio.sleep(0.005)
            assert model.engine.pool.free == model.engine.pool.count, "an answer was left behind"
            return found
        finally:
            await replica.close()

    return asyncio.run(main())


def wish(**options: Any) -> Request:
    own = {name: options.pop(name) for name in ("logprobs", "prompt_logprobs", "stop_strings") if name in options}
    chosen = {"max_tokens": 30, "draft": "lookup", "temperature": 0.9, "seed": 3} | options
    return replace(request(LONG, **chosen), **own)


CASES = [
    {},
    {"logprobs": 2, "prompt_logprobs": True},
    {"stop_strings": ("e",)},
    {"stop_ids": frozenset({40, 41, 42, 2})},
    {"draft": "off", "max_tokens": 1},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[:40])
def test_an_answer_is_the_replicas_own(target: Decoder, case: dict[str, Any]) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        near_by, far = await ask(replica.engine, wish(**case)), await ask(fleet, wish(**case))  # type: ignore[arg-type]
        facts = [[(e.token, e.text, e.logprob, e.round) for e in found[0]] for found in (near_by, far)]
        assert facts[0] == facts[1]
        ends = [found[1] for found in (near_by, far)]
        assert [(e.reason, e.tail, e.stop, e.stop_logprob, e.response.text, e.response.tokens) for e in ends[:1]] == [
            (e.reason, e.tail, e.stop, e.stop_logprob, e.response.text, e.response.tokens) for e in ends[1:]
        ]
        (one,) = await fleet.start([Work(wish(**case), AnswerText(TOKENIZER, LONG, ()), progress=True)])
        items = [item async for item in one]
        read = [item for item in items if isinstance(item, PromptRead)]
        assert read and read[-1].total == len(LONG) and items[: len(read)] == read
        assert bool(one.prompt_logprobs) == ("prompt_logprobs" in case)

    run(target, act)


def test_constraints_travel(target: Decoder) -> None:
    vocabulary = GrammarVocabulary(TOKENIZER, 290, STOP_IDS)
    grammar = compile_grammar(vocabulary, "regex", "[ab]{3}-[0-9]{2}")
    marks: dict[str, Any] = {"think_end_ids": (50, 51), "thinking_open": True, "budget": 4}
    for more in ({}, {"min_tokens": 3}, marks):
        made = build_constraint(290, STOP_IDS, grammar=grammar, **more)
        work = Work(wish(stop_ids=STOP_IDS), AnswerText(TOKENIZER, LONG, ()), made)
        (found,) = unpack(pack([work]), TOKENIZER, lambda: vocabulary)
        assert found.constraint is not None and made is not None and found.constraint is not made
        for _ in range(6):
            drafts = made.forced(3)
            assert found.constraint.forced(3) == drafts
            first, second = made.masks(drafts), found.constraint.masks(drafts)
            assert (first is None and second is None) or (first == second).all()  # type: ignore[union-attr]
            row = None if first is None else first[0]
            token = next(t for t in range(3, 290) if row is None or row[t // 32] >> (t % 32) & 1)
            made.commit(token)
            found.constraint.commit(token)


def test_another_replica_takes_what_was_lost_before_its_first_word(target: Decoder) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        alone = tokens(await ask(replica.engine, wish()))
        near.lose = {0: 0, 1: 1, 2: 0}  # before it was accepted, and after
        assert tokens(await ask(fleet, wish())) == alone  # type: ignore[arg-type]
        assert len(near.routes) == 4 and len(set(near.routes)) == 1

    run(target, act)


def test_an_answer_that_was_begun_ends_with_one_error(target: Decoder) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        near.lose = {0: 3}
        (answer,) = await fleet.start([Work(wish(max_tokens=100), AnswerText(TOKENIZER, LONG, ()))])
        said: list[Emission] = []
        with pytest.raises(ApiError) as error:
            async for item in answer:
                assert not isinstance(item, Ended)
                said += item
        assert said and (error.value.status, error.value.code) == (503, "replica_lost")
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(answer))
        assert len(near.routes) == 1

    run(target, act)


def test_a_request_that_is_always_lost_is_given_up(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF", 0.001)

    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        near.lose = dict.fromkeys(range(100), 0)
        with pytest.raises(ApiError, match="was lost"):
            await ask(fleet, wish())  # type: ignore[arg-type]
        assert len(near.routes) == client.TRIES

    run(target, act)


def test_refusals_come_before_the_first_word(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        with pytest.raises(ApiError) as error:
            await ask(fleet, wish(draft="mtp"))  # type: ignore[arg-type]
        assert error.value.status == 400 and "use one of" in error.value.message and error.value.param == "speculative"
        monkeypatch.setattr(client, "BACKOFF", 0.001)
        fleet.fingerprint = "another model"
        with pytest.raises(ApiError) as error:
            await ask(fleet, wish())  # type: ignore[arg-type]
        assert error.value.status == 503 and error.value.headers["Retry-After"]
        assert len(near.routes) == 1 + client.TRIES, "another replica may have it"
        assert {route.model for route in near.routes[1:]} == {"another model"}

    run(target, act)


def test_waiting_for_a_replica_has_an_end(target: Decoder) -> None:
    class Silent(Near):
        async def answer(self, data: bytes, fingerprint: str, route: Route) -> AsyncGenerator[Item, None]:
            await asyncio.sleep(60)
            yield ChoiceEmissions(0, [])

    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        fleet._replicas = Silent(replica)
        with pytest.raises(ApiError) as error:
            await ask(fleet, wish())  # type: ignore[arg-type]
        assert error.value.code == "queue_timeout"
        await asyncio.sleep(0.01)
        assert not fleet._calls and fleet.state().waiting == 0

    run(target, act, queue_timeout=0.05)


def test_what_nobody_reads_is_stopped_on_the_replica(target: Decoder) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        work = [Work(wish(max_tokens=None, stop_ids=frozenset()), AnswerText(TOKENIZER, LONG, ())) for _ in range(2)]
        first, second = await fleet.start(work)
        assert await anext(aiter(first))
        await first.close()
        assert await anext(aiter(second)), "the other choice goes on"
        await second.close()
        await second.close()
        for _ in range(200):
            if not fleet._calls:
                break
            await asyncio.sleep(0.005)
        assert not fleet._calls

    run(target, act)


def test_before_a_replica_is_there_requests_are_told_so(target: Decoder) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        fleet.fingerprint = None
        assert fleet.state().status == "loading"
        with pytest.raises(ApiError, match="still loading"):
            await ask(fleet, wish())  # type: ignore[arg-type]

    run(target, act)


def test_readings_add_up(target: Decoder) -> None:
    async def act(fleet: FleetEngine, near: Near, replica: Replica) -> None:
        await ask(fleet, wish())  # type: ignore[arg-type]
        one = replica.readings()
        both = together([one, one])
        assert both.totals.generated == 2 * one.totals.generated > 0
        assert both.pages == 2 * one.pages and both.page == one.page
        assert both.histograms["time_to_first_token_seconds"][0][-1] == ("+Inf", 2.0)
        assert both.reasons == {name: 2 * count for name, count in one.reasons.items() if count} | {
            name: 0 for name, count in one.reasons.items() if not count
        }

    run(target, act)
    half = Readings(EngineState("ready", running=1, cache_usage=0.5), pages=100)
    full = Readings(EngineState("draining", running=2, cache_usage=1.0), pages=300)
    state = together([half, full]).state
    assert (state.status, state.running, state.cache_usage) == ("ready", 3, 0.875)
