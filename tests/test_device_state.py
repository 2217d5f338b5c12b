"""What an engine on a device keeps between rounds: pages, drafts, the entries of drafters, graphs."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import (
    DEVICE,
    PROMPTS,
    SLOW,
    TOKENS,
    answers,
    capture_as_a_gpu_does,
    device_engine,
    runner_of,
    tell,
    tiny_folder,
    tiny_head,
)
from engines import Impatient, NoText, finish, request, run
from tiny_qwen import random_model, save_model

from forerun.draft.arms import ARMS
from forerun.draft.mtp import MtpDrafter
from forerun.engine import scheduler
from forerun.engine.captures import Graphs
from forerun.engine.plan import Outcome
from forerun.engine.sequence import Status
from forerun.engine.warmup import warm_up
from forerun.models.layers.rows import Output, Pass
from forerun.policy.decision import PLAIN, Decision
from forerun.policy.records import RoundPart
from forerun.progress import NullProgress

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


def test_pages_are_added_without_losing_drafts(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer longer than what was reserved for it."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    engine, prompt = device_engine(folder, head), [7 + n for n in range(9)]
    wish = {"max_tokens": None, "temperature": 0.8, "seed": 8}
    drafted, pages, take = list[int](), set[int](), engine._take

    def watch(outcome: Outcome) -> RoundPart | None:
        if outcome.turn.sequence.status is Status.RUNNING:
            drafted.append(outcome.drafted)
            pages.add(len(outcome.turn.sequence.cache.pages))
        return take(outcome)

    monkeypatch.setattr(engine, "_take", watch)
    sequence = engine.submit(request(prompt, draft="mtp", draft_tokens=2, **wish), NoText())
    with torch.inference_mode():
        while len(sequence.answer) < 28:
            engine.step()
    engine.release(sequence)
    assert len(pages) > 1 and all(drafted)
    assert sequence.answer[:20] == answers(engine, request(prompt, **{**wish, "max_tokens": 20}))[0]


def test_what_auto_may_want_is_captured_before(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(device_engine(folder, head))
    monkeypatch.setattr(Graphs, "real", True)
    monkeypatch.setattr(runner.graphs, "capture", lambda launch: launch)
    runner.prepare(8, False, NullProgress())
    rounds, drafts = set(runner._rounds), set(runner._drafts)
    assert {shape.width for shape in rounds if not shape.chunks} == set(range(1, 9))
    assert any(shape.chunks for shape in rounds) and all(shape.lines == 1 for shape in rounds)
    assert {shape.depth for shape in drafts} == set(range(1, ARMS["mtp"].deepest + 1)) & set(range(1, 8))
    runner.prepare(8, False, NullProgress())
    assert (set(runner._rounds), set(runner._drafts)) == (rounds, drafts)
    runner.prepare(8, True, NullProgress(), batch=4)
    assert {shape.lines for shape in set(runner._rounds) - rounds if not shape.chunks} == {1, 2, 4}


@pytest.mark.parametrize("broken", [1, 3])
def test_a_pass_fails_while_it_is_captured(
    broken: int, folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been a drafter: the round runs without drafters, and with the rows that it was made for."""
    if DEVICE.type == "cpu":
        capture_as_a_gpu_does(monkeypatch)
    engine, passes = device_engine(folder, head), 0
    wish = request(PROMPTS[0], max_tokens=4, draft="mtp", draft_tokens=2)
    (expected,) = answers(device_engine(folder, None), replace(wish, draft="off", draft_tokens=None))
    usual = engine.model.forward

    def forward(batch: Pass) -> Output:
        nonlocal passes
        passes += 1
        if passes == broken:
            raise RuntimeError("no pass")
        return usual(batch)

    monkeypatch.setattr(engine.model, "forward", forward)
    (sequence,) = run(engine, wish, warned=True)
    assert sequence.answer == expected and "drafter mtp failed" in sequence.warnings[0]


def test_a_round_ends_before_graphs_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string may end a sequence whose next round has begun."""
    engine = device_engine(folder, None)
    sequence = engine.submit(request(PROMPTS[0], max_tokens=TOKENS), NoText())
    while engine._under_way is None:
        engine.step()
    sequence.finish("stop")
    prepared = []
    monkeypatch.setattr(engine.runner, "prepare", lambda *_: prepared.append(engine._under_way))
    engine.warm = True
    warm_up(engine, False, NullProgress())
    assert prepared == [None]


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
    engine = device_engine(path, None, native=True)
    (kind,) = engine.model.config.ropes
    drafter = engine.drafters.rows["mtp"]
    assert isinstance(drafter, MtpDrafter) and drafter.head.rope is engine.model.rope
    table = engine.model.rope[kind].cos
    with pytest.raises(AssertionError, match="graphs"):
        engine.model.rope.reserve(4096)
    assert engine.model.rope[kind].cos is table


@torch.inference_mode()
def test_a_head_joins_late_and_leaves(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy lets it follow for a while: its entries are those it would have had."""
    monkeypatch.setattr(MtpDrafter, "warm", 6)
    wish = request(PROMPTS[0], max_tokens=24, draft="auto", temperature=0.8, seed=3)
    found = []
    for joins in (0, 4):
        engine = device_engine(folder, head)
        sequence = engine.submit(wish, NoText())
        following = {"mtp"} if not joins else set[str]()
        engine.policy.follows = lambda _, names=following: frozenset(names)  # type: ignore[misc]
        tell(engine, lambda _: Decision("mtp", 2))
        while len(sequence.answer) < 20:
            engine.step()
            if len(sequence.answer) >= joins:
                following.add("mtp")
        engine.settle()
        entries, length = sequence.followed["mtp"], sequence.cache.length
        assert entries.start == 1 if not joins else entries.start > len(PROMPTS[0]) + 2
        assert sequence.counters.drafted
        (layer,) = engine.pool.parts["mtp"]
        pages = sequence.cache.blocks[layer.group]
        keys, values = torch.cat(list(layer.keys[pages]), dim=-1), torch.cat(list(layer.values[pages]), dim=-2)
        found.append((sequence.answer, entries.start, length, keys.cpu(), values.cpu()))
        following.clear()
        for _ in range(2):
            engine.step()
        assert "mtp" not in sequence.followed
        engine.release(sequence)
        engine.pool.check([])
    (text, _, one, *whole), (other, start, two, *late) = found
    both, stop = min(len(text), len(other)), min(one, two)
    assert text[:both] == other[:both] and stop > start + 8
    assert torch.equal(whole[0][..., start:stop], late[0][..., start:stop])
    assert torch.equal(whole[1][..., start:stop, :], late[1][..., start:stop, :])


@torch.inference_mode()
def test_a_draft_model_catches_up(folder: Path) -> None:
    """It follows from the first token on, or reads the text when it is to draft; a plain stretch makes it late."""
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 8}
    engine = device_engine(folder, None, draft_model=folder)
    plain = [answers(engine, request(prompt, **options))[0] for prompt in PROMPTS[:2]]
    together = run(engine, *(request(p, draft="model", draft_tokens=3, **options) for p in PROMPTS[:2]))
    assert [s.answer for s in together] == plain
    assert all(s.counters.accepted > 8 for s in together), "it is the target"
    engine.policy.follows = lambda _: frozenset()  # type: ignore[method-assign]
    tell(engine, lambda ask: PLAIN if 4 < ask.limit < 12 else Decision("model", 2))
    late = run(engine, *(request(p, draft="model", draft_tokens=3, **options) for p in PROMPTS[:2]))
    assert [s.answer for s in late] == plain and all(s.counters.accepted > 2 for s in late)
