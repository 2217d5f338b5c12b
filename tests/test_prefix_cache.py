"""The prefix cache in an engine: who shares, who waits, who is thrown out, and what stays right meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PAGE, VOCAB, NoText, decoder, engine, finish, run
from heads import HeadShape, mtp_engine, random_head, write_head
from storm import Storm, random_visit
from test_prefix_bits import FAMILIES, SMALL, TEXT, cold_engine, compare, said, warm_engine, wish
from test_storm import dense_engine, hybrid_engine
from tiny import tiny_model

from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence, Status
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.media import MediaRun, PromptMedia

LONG = [(13 * n * n + 7 * n) % (VOCAB - 4) + 4 for n in range(160)]  # more than is worth waiting for


@pytest.fixture(scope="module", params=["llama", "some windows", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES[request.param](tmp_path_factory.mktemp("m")), quantize=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES["llama"](tmp_path_factory.mktemp("d")), quantize=True)


def rows_of(machine: Engine) -> list[int]:
    """The rows of each pass from now on."""
    usual, found = machine.runner.target.forward, list[int]()

    def forward(batch: Any) -> Any:
        found.append(len(batch.tokens))
        return usual(batch)

    machine.runner.target.forward = forward  # type: ignore[method-assign]
    return found


def steps(machine: Engine, count: int) -> None:
    with torch.inference_mode():
        for _ in range(count):
            machine.step()


def check_end(machine: Engine, cold: Engine, sequences: list[Sequence]) -> None:
    finish(machine, sequences)
    for sequence in sequences:
        (alone,) = run(cold, sequence.request)
        assert said(sequence) == said(alone) and sequence.error is None
        machine.release(sequence)
    machine.pool.check([])
    assert machine.pool.free == machine.pool.count


def test_a_beginning_that_two_want_at_once_is_read_once(model: Decoder) -> None:
    machine, cold = warm_engine(model), cold_engine(model)
    rows = rows_of(machine)
    both = [machine.submit(wish([*LONG, *TEXT[at : at + 20]]), NoText()) for at in (0, 50, 100)]
    finish(machine, both)
    assert [one.counters.cached for one in both] == [0, 160, 160]
    answers = sum(len(one.answer) - 1 for one in both)
    assert sum(rows) == 160 + 3 * 20 + answers
    check_end(machine, cold, both)


@pytest.mark.parametrize("happens", ["pause", "cancel", "release", "fail", "park"])
@pytest.mark.parametrize("after", [1, 4, 9])
def test_who_waits_for_another_never_waits_in_vain(model: Decoder, happens: str, after: int) -> None:
    machine, cold = warm_engine(model), cold_engine(model)
    first, second, third = (machine.submit(wish([*LONG, number, 7, 8]), NoText()) for number in (5, 6, 9))
    steps(machine, after)
    assert first.status is Status.PREFILL and second.status is Status.WAITING and machine.scheduler.follows
    if happens == "fail":
        first.fail(ValueError("broken"))
    elif happens == "park":
        with torch.inference_mode():
            machine.pause(first)
            first.cache.park()
    else:
        getattr(machine, happens)(first)
    finish(machine, [second, third])
    # What the first one had read is found; the second waits no longer, and the third waits for the second.
    assert not machine.scheduler.follows
    assert third.counters.cached == 160
    machine.unpause(first)
    if happens == "cancel":
        machine.resume(first)
    elif happens in ("fail", "release"):
        machine.release(first)
    check_end(machine, cold, [second, third, *([first] if happens in ("pause", "park", "cancel") else [])])


def test_a_system_prompt_survives_requests_that_come_once(model: Decoder) -> None:
    machine, cold, dice = warm_engine(model, pages=40), cold_engine(model), random.Random(2)
    system = LONG[:64]
    for number in range(3):
        compare(machine, cold, wish([*system, number, 5]))
    for _ in range(60):
        run(machine, wish([dice.randrange(4, VOCAB) for _ in range(60)]))
        machine.pool.check([])
    assert compare(machine, cold, wish([*system, 77])).counters.cached == 64


def test_beginnings_come_back_from_host_memory(model: Decoder) -> None:
    machine, cold, dice = warm_engine(model, pages=30), cold_engine(model), random.Random(2)
    index = machine.pool.prefix
    index.host_limit, index.most_states = 1 << 30, 100
    for number in range(30):
        text = LONG if number % 3 == 0 else [dice.randrange(4, VOCAB) for _ in range(150)]
        mine = compare(machine, cold, wish(text, tokens=20))
        assert mine.counters.cached >= 144 or number % 3 or not number
    assert index.host_bytes


def test_pages_that_are_kept_are_free_for_everybody(model: Decoder) -> None:
    machine, cold = warm_engine(model, pages=24), cold_engine(model)
    for number in range(5):
        compare(machine, cold, wish([*LONG[: 8 * number + 9], 5]))
    assert machine.pool.free == 24 > machine.pool.groups[0].free
    compare(machine, cold, wish(TEXT[:150], tokens=24))
    assert compare(machine, cold, wish(TEXT[:150], tokens=24)).counters.cached > 100


def test_texts_that_share_are_parked_and_come_back(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    machine, cold = warm_engine(model, pages=20), cold_engine(model)
    wishes = [replace(wish([*LONG[:32], number], tokens=60 + number)) for number in range(5)]
    wishes = [replace(one, max_tokens=None) if number == 2 else one for number, one in enumerate(wishes)]
    sequences = [machine.submit(one, NoText()) for one in wishes if one.max_tokens]
    check_end(machine, cold, sequences)
    assert machine.scheduler.preemptions


def test_one_salt_knows_nothing_of_another(model: Decoder) -> None:
    machine, cold = warm_engine(model), cold_engine(model)
    machine.pool.prefix.most_states = 10
    for salt in ("", "one", "other"):
        cached = [compare(machine, cold, replace(wish(LONG), cache_salt=salt)).counters.cached for _ in range(2)]
        assert cached == [0, 144 if model.config.delta else 152]
    waiting = [machine.submit(replace(wish(TEXT[:150]), cache_salt=salt), NoText()) for salt in ("one", "other")]
    steps(machine, 1)
    assert [one.status for one in waiting] == [Status.PREFILL] * 2
    check_end(machine, cold, waiting)
    assert [one.counters.cached for one in waiting] == [0, 0]


def test_queries_and_hits_are_counted_to_the_token(dense: Decoder) -> None:
    machine, cold = warm_engine(dense), cold_engine(dense)
    counted = [run(machine, wish(LONG[:length]))[0].counters for length in (160, 50)]
    assert [(one.queried, one.cached) for one in counted] == [(160, 0), (50, 48)]
    assert not run(cold, wish(LONG))[0].counters.queried


def test_off_keeps_nothing(model: Decoder) -> None:
    machine = cold_engine(model)
    for _ in range(2):
        assert run(machine, wish(LONG))[0].counters.cached == 0
    assert not len(machine.pool.prefix) and machine.pool.groups[0].free == machine.pool.count


def test_states_are_few_and_those_of_shared_beginnings_stay(tmp_path: Path) -> None:
    model = decoder(FAMILIES["hybrid"](tmp_path), quantize=True)
    machine, cold, dice = warm_engine(model), cold_engine(model), random.Random(4)
    index, system = machine.pool.prefix, LONG[:50]
    assert index.most_states == 3  # of six slots
    cached = [compare(machine, cold, wish([*system, *TEXT[at : at + 30]])).counters.cached for at in (0, 40, 80)]
    assert cached == [0, 0, 48]  # the second one has met the branching point, and left a state there
    for _ in range(10):
        run(machine, wish([dice.randrange(4, VOCAB) for _ in range(40)]))
        machine.pool.check([])
    assert compare(machine, cold, wish([*system, *TEXT[100:130]])).counters.cached == 48
    assert len([page for page in index._pages.values() if page.state is not None]) == 3


def test_long_prompts_leave_states_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cache.chain.STATE_EVERY", 48)
    model = decoder(FAMILIES["hybrid"](tmp_path), quantize=True)
    machine, cold = warm_engine(model), cold_engine(model)
    machine.pool.prefix.most_states = 10
    compare(machine, cold, wish(LONG))
    for at in (155, 130, 97, 96, 50, 48, 20):
        mine = compare(machine, cold, wish([*LONG[:at], 3, 4]))
        assert mine.counters.cached >= at // 48 * 48


def test_a_head_joins_where_the_text_was_found(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "llama", **SMALL)
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    write_head(tmp_path / "h", folder, shape, random_head(shape))
    machine = mtp_engine(decoder(folder, quantize=True), tmp_path / "h")
    cold = cold_engine(decoder(folder, quantize=True))
    for length in (40, 41, 57, 64, 33, 40):
        (mine,), (alone,) = (
            run(one, wish(LONG[:length], draft, 12)) for one, draft in ((machine, "mtp"), (cold, "off"))
        )
        assert said(mine) == said(alone) and mine.counters.drafted and not mine.warnings
    assert mine.counters.cached == 32


def pictures(*starts: int, seed: int, whole: bool = False) -> PromptMedia:
    noise = torch.randn(10, 48, generator=torch.Generator().manual_seed(seed))
    return PromptMedia([MediaRun(start, noise, whole) for start in starts])


@pytest.mark.parametrize("whole", [False, True])
def test_the_same_picture_is_found_and_another_never(tmp_path: Path, whole: bool) -> None:
    model = decoder(FAMILIES["gemma"](tmp_path), quantize=True)
    machine, cold = warm_engine(model), cold_engine(model)
    one, other = pictures(12, 40, seed=1, whole=whole), pictures(12, 40, seed=2, whole=whole)
    cached = [
        compare(machine, cold, replace(wish(LONG[:length]), media=media)).counters.cached
        for media, length in ((None, 60), (one, 60), (one, 70), (other, 60), (other, 70), (None, 70))
    ]
    assert cached == [0, 8, 56, 8, 56, 56]
    for length in range(50, 60):  # a hit never ends inside of rows that see each other
        compare(machine, cold, replace(wish(LONG[:length]), media=one))
        mixed = PromptMedia([one.runs[0], MediaRun(36, other.runs[1].embeddings, whole)])
        compare(machine, cold, replace(wish(LONG[:length]), media=mixed))
        moved = PromptMedia([one.runs[0], MediaRun(39, one.runs[1].embeddings, whole)])
        compare(machine, cold, replace(wish(LONG[:length]), media=moved))


def test_positions_are_part_of_a_name(tmp_path: Path) -> None:
    places = torch.arange(60).expand(3, -1).clone()
    usual = PromptMedia([MediaRun(20, torch.ones(4, 8))], places)
    names = usual.page_names(PAGE)
    assert [bool(name) for name in names] == [False, False, True, False, False, False, False, False]
    places = places.clone()
    places[0, 3] += 1
    moved = PromptMedia([MediaRun(20, torch.ones(4, 8))], places).page_names(PAGE)
    assert moved[0] and moved[1:] == names[1:]
    again = PromptMedia([MediaRun(20, torch.full((4, 8), 2.0))]).page_names(PAGE)
    assert len(again) == 3 and again[2] != names[2] and not again[0]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_storm_of_texts_that_begin_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pauses, cancellations, faults and too few pages: nothing differs, nothing is lost."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    folder, dice = tiny_model(tmp_path / "m", "llama", **SMALL), random.Random(23)
    make = dense_engine if kind == "dense" else hybrid_engine
    faults = ["propose", "feed", "observe", "close", "sink"]
    arms = ["off", "lookup", "mtp", "model", "auto"]
    visits = [random_visit(dice, arms, faults, 8, arrives=number) for number in range(100)]
    for number, visit in enumerate(visits):
        start = LONG[: dice.choice([5, 16, 24])] if number % 4 else []
        prompt = (*start, *visit.request.prompt)[:40]
        visit.request = replace(visit.request, prompt=prompt, cache_salt="s" * (number % 5 == 0), logprobs=1)
    storm = Storm(make(folder, tmp_path, pages=20), visits)
    storm.engine.pool.prefix.stride, storm.engine.pool.prefix.host_limit = PAGE, 1 << 16
    storm.engine.scheduler.max_sequences = 6
    storm.run()
    storm.compare(make(folder, tmp_path / "again", prefix_cache=False))
    pool = storm.engine.pool
    assert pool.free == pool.count
    assert sum(visit.sequence.counters.cached for visit in visits if visit.sequence is not None) > 200
    happened = ["parked", "pause", "cancel", "accepted", "cancelled", "error"]
    assert all(storm.seen[name] for name in happened), storm.seen


def common(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_an_agent_on_a_hybrid_computes_what_is_new_and_at_most_a_stride(tmp_path: Path) -> None:
    """A system prompt that several conversations share; turns, tool results, and answers that are asked for again."""
    model = decoder(FAMILIES["hybrid"](tmp_path), quantize=True)
    machine, cold = engine(model, context=1500, pages=800), cold_engine(model, context=1500, pages=800)
    index, dice = machine.pool.prefix, random.Random(9)
    index.most_states = 32
    stride = index.stride
    assert stride == 64
    system = [dice.randrange(4, VOCAB) for _ in range(150)]
    seen, found, possible = list[list[int]](), 0, 0
    for conversation in range(3):
        prompt = [*system, *(dice.randrange(4, VOCAB) for _ in range(30))]
        for turn in range(6):
            mine = compare(machine, cold, wish(prompt, tokens=dice.randint(5, 90)))
            best = max((common(text, prompt[:-1]) for text in seen), default=0)
            if turn or conversation > 1:  # the second conversation finds out where they part
                assert mine.counters.cached >= best - stride, (conversation, turn, best)
                found, possible = found + mine.counters.cached, possible + best
            seen.append(mine.tokens[:-1])
            if turn == 2:
                prompt = [*prompt]  # asked for again
            else:
                prompt = [*mine.tokens, *(dice.randrange(4, VOCAB) for _ in range(dice.randint(10, 70)))]
    assert found >= 0.9 * possible  # texts are short beside the stride
