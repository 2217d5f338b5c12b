"""What agents send is found: nearly all of what any earlier text began with, and of hybrids all but a stride of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from agent_trace import Asked, Sizes, Trace, Why, play
from engines import CPU, VOCAB, NoText, decoder, finish, request, run
from test_prefix_bits import FAMILIES, said

from forerun.cache.chain import OPENING, STATE_EVERY
from forerun.cache.pages import MAX_STATES, PagePool
from forerun.cache.prefix import STRIDE
from forerun.draft.arms import MAX_DEPTH
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence as Running
from forerun.loading import PAGE, SEQUENCES
from forerun.models.layers.decoder import Decoder

CONTEXT = 6200  # of which the cache has room for as many as by default
MEMORY = 1 << 33  # as much as the model wants: bounds are those in tokens and states; only what is used is touched
SHORT = Sizes(prose=300, tools=6, longest=1500, together=3, answer=(8, 24))


def machine_of(model: Decoder, prefix_cache: bool = True) -> Engine:
    """An engine with the pool that loading a model makes."""
    pool = PagePool.within(model.config, SEQUENCES * (CONTEXT + MAX_DEPTH), PAGE, MEMORY, torch.float32, CPU)
    assert pool is not None and (model.config.delta is None or pool.prefix.most_states == MAX_STATES)
    return Engine(model, pool, {}, vocab=VOCAB, context=CONTEXT, prefix_cache=prefix_cache)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


@dataclass
class Told:
    """One request, what could have been found of it, and what was."""

    asked: Asked
    sequence: Running
    best: int  # tokens that it shares with an earlier text, answers included
    computed: int  # of them those whose rows had been computed: the last token of an answer is only emitted
    known: int  # of them up to a place that was the end of a prompt or an answer, or where texts had parted, before

    @property
    def cached(self) -> int:
        """As users are told."""
        return self.sequence.counters.cached

    @property
    def over(self) -> int:
        """Rows that were computed beyond what is new and a stride."""
        return self.best - self.cached - STRIDE


@dataclass
class Watch:
    """Runs a trace through an engine, and notes what each request had in common with all texts before it."""

    machine: Engine
    texts: list[tuple[int, ...]] = field(default_factory=list)
    places: list[tuple[int, ...]] = field(default_factory=list)  # texts up to the places that `Told.known` counts
    told: list[Told] = field(default_factory=list)

    def answers(self, asked: list[Asked]) -> Iterator[list[int]]:
        sequences = [self.machine.submit(wish_of(one), NoText()) for one in asked]
        finish(self.machine, sequences, 50000)
        for one, sequence in zip(asked, sequences, strict=True):
            assert sequence.error is None
            best = max((common(text, one.prompt) for text in self.texts), default=0)
            computed = max((common(text[:-1], one.prompt[:-1]) for text in self.texts), default=0)
            reached = [len(place) for place in self.places if place == one.prompt[: len(place)]]
            known = max([*reached, computed // STATE_EVERY * STATE_EVERY])
            self.told.append(Told(one, sequence, best, computed, known))
            self.texts.append(one.prompt)  # those that were asked with it begin behind it
            self.places += [one.prompt[:computed], one.prompt[:-OPENING], one.prompt[:-1]]
        for sequence in sequences:
            self.texts.append(tuple(sequence.tokens))
            self.places.append(tuple(sequence.tokens[:-1]))
            self.machine.release(sequence)
        self.machine.pool.check([])
        return iter([sequence.answer for sequence in sequences])


def wish_of(asked: Asked) -> Request:
    """Asked again it is answered otherwise: the seed is the request's own."""
    made = request(asked.prompt, max_tokens=asked.most, temperature=0.7, seed=asked.number)
    return replace(made, logprobs=1)


def watched(model: Decoder, seed: int, rounds: int, sizes: Sizes, states: int | None = None) -> Watch:
    """A trace from beginning to end. `states`: as many recurrent ones as that, instead of the usual."""
    watch = Watch(machine_of(model))
    if states is not None and model.config.delta is not None:
        watch.machine.pool.prefix.most_states = states
    play(Trace(seed, sizes), rounds, watch.answers)
    return watch


def share(told: Iterable[Told]) -> float:
    """Of what all these requests shared with earlier texts: how much was found."""
    told = list(told)
    return sum(one.cached for one in told) / sum(one.best for one in told)


def check_answers(model: Decoder, told: list[Told]) -> None:
    """They are those of an engine without the cache, tokens and log probabilities."""
    cold = machine_of(model, prefix_cache=False)
    for start in range(0, len(told), 16):
        some = told[start : start + 16]
        alone = run(cold, *(wish_of(one.asked) for one in some))
        assert [said(one.sequence) for one in some] == [said(one) for one in alone]
        assert not any(one.counters.cached for one in alone)


@pytest.fixture(scope="module", params=["llama", "gemma", "hybrid", "hybrid experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES[request.param](tmp_path_factory.mktemp("m")), quantize=True)


def test_a_trace_is_what_agents_send() -> None:
    """The same seed and answers make the same trace, and all that agents do comes up in it."""

    def told(seed: int) -> list[Asked]:
        trace = Trace(seed)
        play(trace, 40, lambda asked: ([17 + one.number % 90] * one.most for one in asked))
        return trace.asked

    trace = told(1)
    assert [one.prompt for one in trace] == [one.prompt for one in told(1)] != [one.prompt for one in told(2)]
    assert {one.why for one in trace} == set(Why)
    system = common(trace[0].prompt, next(one.prompt for one in trace[1:] if one.why is Why.BEGINS))
    assert system > 1000 and all(common(one.prompt, trace[0].prompt) >= system for one in trace if one.conversation)


def test_what_agents_send_is_found(model: Decoder) -> None:
    watch = watched(model, seed=1, rounds=4, sizes=SHORT)
    check_answers(model, watch.told)
    if model.config.delta is None:  # all full pages, but that of the last token
        assert share(watch.told) >= 0.95
        assert all(one.cached == one.computed // PAGE * PAGE for one in watch.told)
    else:  # so short a trace must not count the first text that parts from another in the middle of its prompt
        assert share(one for one in watch.told if one.over <= 0 or one.known >= one.computed - STRIDE) >= 0.95


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_long_traces_are_found(family: str, seed: int, tmp_path: Path) -> None:
    model = decoder(FAMILIES[family](tmp_path), quantize=True)
    watch = watched(model, seed, 15, Sizes())
    print(f"{family}, seed {seed}: {len(watch.told)} requests, {share(watch.told):.4f} of what they shared was found")
    assert share(watch.told) >= 0.95
    check_answers(model, watch.told[::5])


@pytest.mark.parametrize("seed", [3, 4])
def test_a_hybrid_computes_what_is_new_and_a_stride(seed: int, tmp_path: Path) -> None:
    """Where there is room for all states, this is exact: one is there at the end of every prompt, before the marks
    that begin its answer too, at the end of every answer, and where texts have parted before. The first text that parts
    from others elsewhere is read from the last such place on, and leaves a state for the next.
    """
    model = decoder(FAMILIES["hybrid"](tmp_path), quantize=True)
    told = watched(model, seed, 8, SHORT, states=1000).told
    for one in told:
        assert one.known // STRIDE * STRIDE <= one.cached <= one.computed // STRIDE * STRIDE, one.asked.why
    over = [one for one in told if one.over > 0]
    assert all(one.known < one.computed for one in over) and 0 < len(over) < len(told) / 5
    assert share(one for one in told if one.over <= 0) >= 0.95


def test_marks_before_an_answer_may_go_with_its_thoughts(tmp_path: Path) -> None:
    """A prompt that ends right behind a stride: without its last marks there is a state before them."""
    machine = machine_of(decoder(FAMILIES["hybrid"](tmp_path), quantize=True))
    for length in range(2 * STRIDE - 1, 2 * STRIDE + 6):
        for marks in range(1, OPENING):
            text = [4 + (number * number + 7 * length + marks) % 280 for number in range(length)]
            run(machine, request(text, max_tokens=1))
            (later,) = run(machine, request([*text[:-marks], 3, *text[:20]], max_tokens=1))
            assert later.counters.cached == (length - marks) // STRIDE * STRIDE, (length, marks)
