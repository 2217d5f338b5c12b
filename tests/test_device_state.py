"""What an engine on a device keeps between rounds: pages, drafts, what the head has yet to read, graphs, costs."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import (
    DEVICE,
    PAGE,
    PROMPTS,
    SLOW,
    TOKENS,
    answers,
    device_engine,
    device_of,
    tiny_folder,
    tiny_head,
)
from engines import Impatient, NoText, finish, request
from tiny_qwen import random_model, save_model

from forerun.cache.pages import PagePool
from forerun.draft import mtp_device
from forerun.draft.mtp import MtpDrafter
from forerun.engine import scheduler
from forerun.engine.plan import Result, Round, Turn
from forerun.engine.sequence import Status
from forerun.engine.warmup import warm_up
from forerun.kernels.cuda import CudaKernels
from forerun.loading import attach_head, graphed
from forerun.models.families import build
from forerun.policy.controller import Controller
from forerun.policy.costs import CostTable, RoundTime
from forerun.policy.decision import PLAIN, Decision
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.usefixtures("fewer_programs"),
    pytest.mark.filterwarnings("ignore:.*encountered in (multiply|reduce|exp)"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_head(tmp_path_factory.mktemp("h"), folder)


@SLOW
def test_pages_are_added_without_losing_drafts(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer longer than what was reserved for it."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    engine, prompt = device_engine(folder, head), [7 + n for n in range(9)]
    wish = {"max_tokens": None, "temperature": 0.8, "seed": 8}
    drafted, pages, take = [], set(), engine._take

    def watch(result: Result) -> None:
        if result.turn.sequence.status is Status.RUNNING:
            drafted.append(result.drafted)
            pages.add(len(result.turn.sequence.cache.pages))
        take(result)

    monkeypatch.setattr(engine, "_take", watch)
    sequence = engine.submit(request(prompt, draft="mtp", draft_tokens=2, **wish), NoText())
    with torch.inference_mode():
        while len(sequence.answer) < 28:
            engine.step()
    engine.release(sequence)
    assert len(pages) > 1 and drafted[0] == 0 and all(drafted[1:])
    assert sequence.answer[:20] == answers(engine, request(prompt, **{**wish, "max_tokens": 20}))[0]


def test_what_auto_may_want_is_captured_before(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(folder, head)
    device = device_of(engine)
    monkeypatch.setattr(device.counts, "keep_bits", lambda rows: rows != 2)
    monkeypatch.setattr(type(device.rounds.graphs), "real", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(device.rounds.graphs, "capture", lambda launch: lambda: torch.zeros(1, 3))
    monkeypatch.setattr(device.half, "prepare", lambda _: None)
    timed = device.prepare(8, False, NullProgress())
    assert [(measured.rows, measured.inside) for measured in timed] == [
        *((1, None), (4, None), (8, None)),
        *((1 + depth, ("mtp", depth)) for depth in range(2, 7)),
        *((1, ("mtp", 3)), (8, ("mtp", 3))),
    ]
    assert all(measured.seconds > 0 for measured in timed) and len(list(device.rounds)) == len(timed)
    assert device.prepare(8, False, NullProgress()) == []
    assert len(device.prepare(8, True, NullProgress())) == len(timed)


def test_a_flight_lands_before_graphs_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string may end a sequence whose next round has begun."""
    engine = device_engine(folder, None)
    device = device_of(engine)
    sequence = engine.submit(request(PROMPTS[0], max_tokens=TOKENS), NoText())
    while engine._under_way is None or not engine._under_way.turns:
        engine.step()
    sequence.finish("stop")
    monkeypatch.setattr(device, "prepare", lambda *_: [] if engine._under_way is None else pytest.fail("in the air"))
    engine.warm = True
    warm_up(engine, False, NullProgress())


@torch.inference_mode()
def test_tokens_the_host_dropped_are_not_gone_on_from(folder: Path, head: Path) -> None:
    """The device has accepted more than an answer had room for; then it is taken up again."""
    engine = device_engine(folder, head)
    whole = answers(engine, request(PROMPTS[0], max_tokens=TOKENS))[0]
    sequence = engine.submit(request(PROMPTS[0], max_tokens=TOKENS, draft="mtp", draft_tokens=2), NoText())
    slots = device_of(engine).slots
    while not slots.occupants:
        engine.step()
    engine.settle()
    (wish,) = engine._decide([sequence])
    assert wish.decision.depth == 2
    slots.give({0: whole[len(sequence.answer) :][:2]})
    slots.occupants[0].held = 2
    assert engine._fit(wish)
    engine._start(Round([wish], [], 0.0))
    sequence.limit = len(sequence.tokens) + 1
    engine.settle()
    assert sequence.finish_reason == "length" and slots.occupants[0].stale
    engine.resume(sequence, TOKENS - len(sequence.answer))
    finish(engine, [sequence])
    assert sequence.answer == whole


@torch.inference_mode()
def test_a_sequence_that_comes_back_to_other_pages(folder: Path) -> None:
    engine = device_engine(folder, None)
    whole = answers(engine, request(PROMPTS[1], max_tokens=TOKENS))[0]
    sequence = engine.submit(request(PROMPTS[1], max_tokens=TOKENS), NoText())
    while len(sequence.answer) < 3:
        engine.step()
    engine.pause(sequence)
    before = list(sequence.cache.pages)
    sequence.cache.park()
    taken = engine.pool.groups[0].take(2)
    engine.unpause(sequence)
    finish(engine, [sequence])
    assert sequence.answer == whole and sequence.cache.pages != before
    engine.pool.groups[0].give_back(taken)


@SLOW
@torch.inference_mode()
def test_the_head_reads_plain_rounds_later(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain stretch put by is what it would have read at once: its keys and values are the general way's."""
    monkeypatch.setattr(mtp_device, "RING", 8)
    wish = request(PROMPTS[0], max_tokens=12, draft="auto", temperature=0.8, seed=3)
    monkeypatch.setattr(Controller, "decide", lambda *_: PLAIN)
    found, reads = [], []
    for rounds in (True, False):
        engine = device_engine(folder, head, rounds=rounds)
        drafter = engine.drafters.by_name["mtp"]
        assert isinstance(drafter, MtpDrafter)
        half = device_of(engine).half if rounds else None
        if half is not None:
            assert isinstance(half, mtp_device.MtpDeviceHalf)
            reading = half._reading
            monkeypatch.setattr(half, "_reading", lambda *key: reads.append(key[1]) or reading(*key))  # noqa: B023
        sequence = engine.submit(wish, NoText())
        while len(sequence.answer) < 10:
            engine.step()
        engine.settle()
        if half is not None:
            assert half.behind_most
            engine.executor.forget(sequence)
            assert not half.behind_most and not half.behind.any()
        state = drafter._serve(sequence.id)
        assert drafter._make_room(state, 40, [state])
        drafter._catch_up([state])
        pages = state.cache.pages
        layer = drafter.pool.layers[0]
        keys, values = torch.cat(list(layer.keys[pages]), dim=-1), torch.cat(list(layer.values[pages]), dim=-2)
        found.append((keys[..., :14].cpu(), values[..., :14, :].cpu()))
        engine.release(sequence)
    assert reads[:3] == [4, 1, 8] and len(reads) > 3  # what it came with, a full ring, what was left
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@SLOW
@torch.inference_mode()
def test_drafts_need_room_in_the_pages(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane beside deeper ones holds drafts, right ones too, but was given pages for one row only."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    monkeypatch.setattr(scheduler, "MAX_DEPTH", 0)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 8}
    prompts = [PROMPTS[0], [7 + n for n in range(PAGE - 2)]]
    engine = device_engine(folder, head)
    plain = [answers(engine, request(prompt, max_tokens=6, **options))[0] for prompt in prompts]
    arms: list[dict[str, Any]] = [{"draft": "mtp", "draft_tokens": 2}, {"draft": "auto"}]
    both = [
        engine.submit(request(prompt, max_tokens=None, **arm, **options), NoText())
        for prompt, arm in zip(prompts, arms, strict=True)
    ]
    device, tight = device_of(engine), both[1]
    monkeypatch.setattr(device, "_may_repeat", lambda _: False)  # nothing is repeated before it was delivered
    monkeypatch.setattr(Controller, "decide", lambda *_: PLAIN)
    while tight.cache.length < PAGE - 2:
        engine.step()
    engine.settle()
    assert tight.cache.length == PAGE - 1 and len(tight.cache.pages) == 1
    slots = device.slots.assign(both)
    device.slots.give({slot: a[len(s.answer) :][:2] for slot, s, a in zip(slots, both, plain, strict=True)})
    for occupant in device.slots.occupants.values():
        occupant.held = 2
    accepted = both[0].counters.accepted
    turns = [Turn(s, wish) for s, wish in zip(both, (Decision("mtp", 2), PLAIN), strict=True)]
    assert all(engine._fit(turn) for turn in turns)
    engine._start(Round(turns, [], 0.0))
    engine.settle()
    assert tight.cache.length == PAGE and both[0].counters.accepted >= accepted + 2
    while any(len(s.answer) < 6 for s in both):
        engine.step()
    assert [s.answer[:6] for s in both] == plain


@SLOW
@torch.inference_mode()
@pytest.mark.parametrize("where", ["read", "round"])
def test_an_interrupted_capture_loses_nothing(
    folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While the head catches up, or before a round of another shape: the next step goes on."""
    monkeypatch.setattr(mtp_device, "RING", 4)
    prompt, options = [5, 6, 7], {"max_tokens": 9, "temperature": 0.8, "seed": 8}
    engine = device_engine(folder, head)
    plain = answers(engine, request(prompt, **options))[0]
    decisions = iter([PLAIN] * 3 + [Decision("mtp", 2)] * (where == "round") + [PLAIN] * 20)
    monkeypatch.setattr(Controller, "decide", lambda *_: next(decisions))
    device, interrupted = device_of(engine), []
    place, name = (device.half, "_reading") if where == "read" else (device.rounds.graphs, "capture")
    usual = getattr(place, name)

    def idle() -> bool:
        """The lanes were cleared for the capture of a second shape."""
        return any(shape.followed for shape in device.rounds) and not device.slots.live.any()

    def once(*args: Any) -> Any:
        if not interrupted and (len(sequence.answer) > 3 if where == "read" else sequence.answer and idle()):
            interrupted.append(len(sequence.answer))
            raise KeyboardInterrupt
        return usual(*args)

    monkeypatch.setattr(place, name, once)
    sequence = engine.submit(request(prompt, draft="auto", **options), NoText())
    for _ in range(40):
        with suppress(KeyboardInterrupt):
            engine.step()
    assert interrupted and sequence.answer == plain


@pytest.mark.parametrize("depth", [None, pytest.param(2, marks=SLOW)])
def test_an_interrupt_in_every_round_loses_nothing(folder: Path, head: Path, depth: int | None) -> None:
    """While the next round is under way already."""
    engine = device_engine(folder, head)
    wish = {"max_tokens": 7, "draft": "mtp", "draft_tokens": depth} if depth else {"max_tokens": 7}
    plain = answers(engine, request(PROMPTS[0], **wish))[0]
    sink, interrupted = Impatient(), 0
    sequence = engine.submit(request(PROMPTS[0], **wish), sink)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(40):
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
            sink.pressed = False
    signal.signal(signal.SIGINT, before)
    assert sequence.answer == plain and interrupted > 2


def test_an_interrupt_while_a_round_lands_for_a_pause(folder: Path) -> None:
    engine = device_engine(folder, None)
    wish = request(PROMPTS[0], max_tokens=6)
    plain = answers(engine, wish)[0]
    sink = Impatient()
    sink.pressed = True
    sequence = engine.submit(wish, sink)
    while len(sequence.answer) < 2 or engine._under_way is None:
        engine.step()
    sink.pressed = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        engine.pause(sequence)
    signal.signal(signal.SIGINT, before)
    engine.unpause(sequence)
    other = engine.submit(request(PROMPTS[1], max_tokens=2), NoText())  # lanes are seated anew
    finish(engine, [sequence, other])
    assert sequence.answer == plain and len(sequence.emissions) == len(plain)


def test_a_head_leaves_the_table_of_angles_where_graphs_read_it(tmp_path: Path) -> None:
    """A native head shares it with its model, whose own context may be longer than what is asked for."""
    path = save_model(tmp_path, random_model(False, max_position_embeddings=4096))
    checkpoint = open_checkpoint(path)
    decoder = build(checkpoint, CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, 60, PAGE, torch.float32, DEVICE, slots=2, on_device=True)
    graphed(decoder, pool, 1024)
    (kind,) = decoder.config.ropes
    table, head = decoder.rope[kind].cos, decoder.native_head()
    assert head is not None and head.rope is decoder.rope
    attach_head(head, decoder, pool, decoder.config.vocab, 1024)
    assert decoder.rope[kind].cos is table
    with pytest.raises(AssertionError, match="graphs"):
        decoder.rope.reserve(4096)


def test_plain_rounds_that_draft_tell_what_plain_decoding_costs() -> None:
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, 0.01)
    costs.learn_draft("mtp", 3, 0.004)
    for _ in range(60):
        costs.learn_round(RoundTime(1, 1, 0.024, inside=("mtp", 3)))
    assert abs(costs.pass_seconds(1) - 0.024 / 1.4) < 0.001  # four steps of drafting take 0.4 of it
