"""The engine on a device, or in Triton's interpreter: whole rounds in one launch give the tokens of the general way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, CONTEXT, VOCAB, NoText, Scripted, finish, request, run
from heads import HeadShape, random_head, write_head
from tiny import tiny_model
from tiny_qwen import tiny_qwen

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.head import build_head
from forerun.draft.lookup import Lookup
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter
from forerun.engine import device_round, scheduler, unread
from forerun.engine.controller import PLAIN, Controller, Decision
from forerun.engine.costs import CostTable
from forerun.engine.engine import Engine
from forerun.engine.flight import Flight, Shape, Wish, learn_costs
from forerun.engine.graphs import GraphedTarget
from forerun.engine.on_device import device_rounds, graphed_target
from forerun.engine.probe import probe
from forerun.engine.round import NOTHING, Turn
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu import attention, filtering
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import make_pass
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.heads import read_head

# Rows that nobody looks at may overflow; the interpreter says so.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:.*encountered in matmul")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = pytest.mark.long if DEVICE.type == "cpu" else pytest.mark.kernels  # minutes in the interpreter
PAGE, TOKENS = 16, 9 if DEVICE.type == "cuda" else 6
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
PROMPTS = [[5, 6, 7, 8, 9], [40, 41] * 9, [100 + n for n in range(20)]]
SOME = PROMPTS if DEVICE.type == "cuda" else PROMPTS[:2]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "splits", lambda layout: 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m"), "llama", **SMALL)


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    return write_head(tmp_path_factory.mktemp("h"), folder, shape, random_head(shape), list(range(4, 290, 2)))


def device_engine(folder: Path, head: Path | None, *, rounds: bool = True) -> Engine:
    decoder = build(open_checkpoint(folder), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, 60, PAGE, torch.float32, DEVICE, slots=4, on_device=True)
    drafters: dict[str, Drafter] = {"lookup": Lookup()}
    if head is not None:
        drafters["mtp"] = attach(head, decoder)
    target = graphed_target(decoder, pool, CONTEXT)
    parts = device_rounds(target, drafters, VOCAB) if rounds else None
    return Engine(decoder, pool, drafters, vocab=VOCAB, context=CONTEXT, chunk=CHUNK, target=target, device=parts)


def attach(head: Path, decoder: Decoder) -> MtpDrafter:
    built = build_head(read_head(head), decoder, VOCAB)
    decoder.taps = built.taps
    built.block.rope.reserve(2 * CONTEXT)
    pool = PagePool(built.block.layout, 1, 60, PAGE, torch.float32, DEVICE, on_device=True)
    return MtpDrafter(built, pool, VOCAB, CHUNK)


def answers(engine: Engine, *requests: Any) -> list[list[int]]:
    return [sequence.answer for sequence in run(engine, *requests)]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 0.8])
def test_whole_rounds_give_the_tokens_of_the_general_way(folder: Path, head: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": temperature, "seed": 11}
    general = device_engine(folder, head, rounds=False)
    plain = [answers(general, request(prompt, **options))[0] for prompt in SOME]
    engine = device_engine(folder, head)
    assert answers(engine, *(request(prompt, **options) for prompt in SOME)) == plain
    drafted = [request(prompt, draft="mtp", draft_tokens=2, **options) for prompt in SOME]
    assert answers(engine, drafted[0]) == plain[:1]
    assert answers(engine, *drafted) == plain


@SLOW
def test_the_device_drafts_what_the_general_way_drafts(folder: Path, head: Path) -> None:
    wish = request(PROMPTS[1], max_tokens=TOKENS, draft="mtp", draft_tokens=2, temperature=0.8, seed=2)
    ahead, general = (run(device_engine(folder, head, rounds=rounds), wish)[0] for rounds in (True, False))
    assert ahead.answer == general.answer
    # The device's first round has no drafts; from then on both draft the same.
    assert abs(ahead.counters.accepted - general.counters.accepted) <= 2
    assert ahead.counters.drafted > 0


@SLOW
def test_arms_may_change_between_rounds_and_sequences_come_and_go(folder: Path, head: Path) -> None:
    engine, options = device_engine(folder, head), {"max_tokens": TOKENS, "seed": 3}
    alone = [
        answers(engine, request(PROMPTS[0], **options))[0],
        answers(engine, request(PROMPTS[1], repetition_penalty=1.2, temperature=0.9, **options))[0],
        answers(engine, request(PROMPTS[2], **options))[0],
    ]
    first = engine.submit(request(PROMPTS[0], draft="mtp", draft_tokens=2, **options), NoText())
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
    others = [
        engine.submit(
            request(PROMPTS[1], draft="mtp", repetition_penalty=1.2, temperature=0.9, **options), NoText()
        ),  # a penalty: the general way
        engine.submit(request(PROMPTS[2], draft="lookup", **options), NoText()),
    ]
    finish(engine, [first, *others])
    assert [s.answer for s in (first, *others)] == alone


def test_drafts_of_the_host_are_run_on_the_device(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or beside lanes whose drafts come from the head or that have none; nobody goes the general way."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 6}
    engine = device_engine(folder, head)
    plain = [answers(engine, request(prompt, **options))[0] for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]

    def mostly_right(tokens: list[int], depth: int) -> list[int]:
        whole = next(text for text in texts if text[: len(tokens)] == tokens)
        ahead = whole[len(tokens) : len(tokens) + depth]
        return [*ahead[:-1], 3] if len(tokens) % 3 == 0 else ahead

    def never(*_: object) -> None:
        raise AssertionError("the general way")

    engine.drafters["lookup"] = Scripted(mostly_right)
    monkeypatch.setattr("forerun.engine.engine.run_round", never)
    (alone,) = run(engine, request(PROMPTS[1], draft="lookup", draft_tokens=5, **options))
    assert alone.answer == plain[1] and alone.counters.rounds < TOKENS // 2
    device = engine.device
    assert device is not None and any(shape.width == 8 and not shape.drafts for shape in device.rounds)
    arms = [("off", None), ("lookup", 3), ("mtp", 2)]
    wishes = [
        request(prompt, draft=arm, draft_tokens=depth, **options)
        for prompt, (arm, depth) in zip(PROMPTS, arms, strict=True)
    ]
    together = run(engine, *wishes)
    assert [sequence.answer for sequence in together] == plain
    assert together[0].counters.drafted == 0 and together[1].counters.accepted > 0 < together[2].counters.drafted


@SLOW
def test_pages_are_added_without_losing_drafts(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer longer than what was reserved for it."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    engine, prompt = device_engine(folder, head), [7 + n for n in range(9)]
    wish = {"max_tokens": None, "temperature": 0.8, "seed": 8}
    assert engine.device is not None
    drafted, pages, take = [], set(), engine.device._take

    def watch(turn: Turn, drafts: int, *rest: Any) -> int:
        drafted.append(drafts)
        pages.add(len(turn.sequence.cache.pages))
        return take(turn, drafts, *rest)

    monkeypatch.setattr(engine.device, "_take", watch)
    sequence = engine.submit(request(prompt, draft="mtp", draft_tokens=2, **wish), NoText())
    with torch.inference_mode():
        while len(sequence.answer) < 28:
            engine.step()
    engine.release(sequence)
    assert len(pages) > 1 and drafted[0] == 0 and all(drafted[1:])
    assert sequence.answer[:20] == answers(engine, request(prompt, **{**wish, "max_tokens": 20}))[0]


def test_what_auto_may_want_is_captured_before(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(folder, head)
    device = engine.device
    assert device is not None
    monkeypatch.setattr(device.counts, "keep_bits", lambda rows: rows != 2)
    monkeypatch.setattr(device.graphs, "capture", lambda launch: lambda: torch.zeros(1, 3))
    timed = device.prepare(3, 8, False, NullProgress())
    assert [(shape.width, shape.drafts) for shape, _ in timed] == [
        *((1, 0), (4, 0), (8, 0)),
        *((3, 2), (4, 3)),
        *((1, 3), (8, 3)),
    ]
    assert all(seconds > 0 and shape in device.rounds for shape, seconds in timed)
    assert device.prepare(3, 8, False, NullProgress()) == []
    assert all(shape.filtered for shape, _ in device.prepare(3, 8, True, NullProgress()))


def test_a_flight_lands_before_graphs_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string may end a sequence whose next round has begun."""
    engine = device_engine(folder, None)
    device = engine.device
    assert device is not None
    sequence = engine.submit(request(PROMPTS[0], max_tokens=TOKENS), NoText())
    with torch.inference_mode():
        while device.flight is None:
            engine.step()
        sequence.finish("stop")
        monkeypatch.setattr(type(device.graphs), "real", True)
        monkeypatch.setattr(device, "prepare", lambda *_: [] if device.flight is None else pytest.fail("in the air"))
        engine.warm = True
        engine.warm_up(False, NullProgress())


@torch.inference_mode()
def test_tokens_the_host_dropped_are_not_gone_on_from(folder: Path, head: Path) -> None:
    """The device has accepted more than an answer had room for; then it is taken up again."""
    engine = device_engine(folder, head)
    whole = answers(engine, request(PROMPTS[0], max_tokens=TOKENS))[0]
    sequence = engine.submit(request(PROMPTS[0], max_tokens=TOKENS, draft="mtp", draft_tokens=2), NoText())
    device = engine.device
    assert device is not None
    while device.flight is None:
        engine.step()
    engine.land(go_on=False)
    (turn,) = engine._decide([sequence])
    assert turn.decision.depth == 2
    device.lanes.give([whole[len(sequence.answer) :][:2]])
    device._depth = 2
    device.launch([turn], 0.0, 0.0)
    sequence.limit = len(sequence.tokens) + 1
    engine.land(go_on=False)
    assert sequence.finish_reason == "length" and device._stale
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
    taken = engine.pool.take(2)
    engine.unpause(sequence)
    finish(engine, [sequence])
    assert sequence.answer == whole and sequence.cache.pages != before
    engine.pool.give_back(taken)


@pytest.mark.parametrize("gathered", [pytest.param(1024, marks=SLOW), 64])
def test_filters_on_the_device(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, gathered: int) -> None:
    """With little room for tokens the device leaves rows open; the general way decides them, and it goes on there."""
    ways: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 7, "top_p": 0.8}, {"min_p": 0.3}]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "seed": 4}
    wishes = [(prompt, {**options, **way}) for prompt, way in zip(PROMPTS, ways, strict=True)]
    general = device_engine(folder, head, rounds=False)
    plain = [answers(general, request(prompt, **wish))[0] for prompt, wish in wishes]
    monkeypatch.setattr(filtering, "GATHERED", gathered)
    engine = device_engine(folder, head)
    assert engine.device is not None
    left = []
    take = engine.device._take
    monkeypatch.setattr(engine.device, "_take", lambda *given: left.append(take(*given)) or left[-1])
    assert answers(engine, *(request(prompt, draft="mtp", draft_tokens=2, **wish) for prompt, wish in wishes)) == plain
    assert any(shape.filtered for shape in engine.device.rounds)
    assert (min(left) < 0) == (gathered < 290)


def test_cancelled_in_the_air_and_taken_up_again(folder: Path, head: Path) -> None:
    engine, wish = device_engine(folder, head), request(PROMPTS[0], max_tokens=TOKENS, draft="mtp", draft_tokens=2)
    whole = answers(engine, wish)[0]
    sequence = engine.submit(wish, NoText())
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
        assert engine.device is not None and engine.device.flight is not None
        engine.cancel(sequence)
        assert engine.device.flight is None and sequence.answer == whole[: len(sequence.answer)]
        engine.resume(sequence)
    finish(engine, [sequence])
    assert sequence.answer == whole


def test_a_stop_token_ends_the_answer_there(folder: Path, head: Path) -> None:
    engine = device_engine(folder, head)
    whole = answers(engine, request(PROMPTS[2], max_tokens=TOKENS))[0]
    stop = whole[5]
    wish = request(PROMPTS[2], max_tokens=TOKENS, draft="mtp", draft_tokens=3, stop_ids=frozenset({stop}))
    (sequence,) = run(engine, wish)
    assert sequence.finish_reason == "stop" and sequence.answer == whole[: whole.index(stop)]


def test_a_controller_is_asked_again(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round, but the last before the end: what it wants then is done in the round after the next."""
    engine, asked = device_engine(folder, head), []
    plain = answers(engine, request(PROMPTS[0], max_tokens=10))[0]
    wishes = [PLAIN, Decision("mtp", 1), Decision("mtp", 1), Decision("mtp", 2), PLAIN, PLAIN, PLAIN]

    def decide(controller: Controller, limit: int, available: dict[str, bool], others: int) -> Decision:
        assert limit and available["mtp"] and not others
        asked.append(engine.device is not None and engine.device.flight is not None)
        return wishes[len(asked) - 1]

    monkeypatch.setattr(Controller, "decide", decide)
    assert engine.device is not None
    widths, start = [], engine.device._start
    monkeypatch.setattr(engine.device, "_start", lambda *args: widths.append(args[1]) or start(*args))
    (sequence,) = run(engine, request(PROMPTS[0], max_tokens=10, draft="auto"))
    assert sequence.answer == plain
    assert asked[:4] == [False, True, True, True]
    assert widths[:4] == [1, 1, 2, 2]


@SLOW
def test_a_pass_is_narrowed_where_products_change_bits(folder: Path, head: Path) -> None:
    """Whole rounds of one sequence go on; rounds of several take the general way, in passes they may have."""
    options: dict[str, Any] = {"max_tokens": 4, "draft": "mtp", "draft_tokens": 2, "temperature": 0.8, "seed": 5}
    engine = device_engine(folder, head)
    alone = [answers(engine, request(prompt, **options))[0] for prompt in PROMPTS]
    device, target = engine.device, engine.target
    assert device is not None and device.rounds and isinstance(target, GraphedTarget)
    target.counts.keep_bits = lambda rows: rows <= 3  # type: ignore[method-assign]
    assert answers(engine, *(request(prompt, **options) for prompt in PROMPTS)) == alone
    assert all(shape.lanes == 1 for shape in device.rounds)
    assert target.passes and all(lanes == 1 for lanes, _, _ in target.passes)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=SLOW)])
def test_the_probe_runs_through_the_graphs(folder: Path, tmp_path: Path, kind: str) -> None:
    """Its first tokens are a prefill chunk, the others go through captured passes; it leaves nothing behind."""
    path = folder if kind == "llama" else tiny_qwen(tmp_path)
    decoder = build(open_checkpoint(path), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, 20, PAGE, torch.float32, DEVICE, slots=2, on_device=True)
    target = graphed_target(decoder, pool, CONTEXT)
    assert probe(decoder, pool, [2, 3], target, target.counts).guaranteed
    pool.check([])
    assert target.counts.keep_bits(2)


@torch.inference_mode()
def test_the_head_reads_plain_rounds_later(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain stretch put by is what it would have read at once: its keys and values are the general way's."""
    monkeypatch.setattr(unread, "RING", 8)
    monkeypatch.setattr(device_round, "RING", 8)
    wish = request(PROMPTS[0], max_tokens=12, draft="auto", temperature=0.8, seed=3)
    monkeypatch.setattr(Controller, "decide", lambda *_: PLAIN)
    found, reads = [], []
    for rounds in (True, False):
        engine = device_engine(folder, head, rounds=rounds)
        drafter = engine.drafters["mtp"]
        assert isinstance(drafter, MtpDrafter)
        if engine.device is not None:
            assert engine.device.unread is not None
            reading = engine.device.unread.reading
            monkeypatch.setattr(engine.device.unread, "reading", lambda *key: reads.append(key[1]) or reading(*key))  # noqa: B023
        sequence = engine.submit(wish, NoText())
        while len(sequence.answer) < 10:
            engine.step()
        engine.land(go_on=False)
        if engine.device is not None:
            assert engine.device.unread is not None and engine.device.unread.rounds
            engine.device.leave()
            assert not engine.device.unread.rounds and not engine.device.unread.behind.any()
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


@torch.inference_mode()
def test_a_padded_prompt_gives_what_it_gives_alone(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine(folder, head)
    assert isinstance(engine.target, GraphedTarget)
    capture = engine.target.graphs.capture

    def run_once(launch: Any) -> Any:
        launch()  # as a real capture does, with whatever the buffers hold
        return capture(launch)

    monkeypatch.setattr(engine.target.graphs, "capture", run_once)
    engine.model.embedding[70] = float("nan")  # a token that spoils what it is near
    for length in (20, 5, 20, 8):
        found = []
        for target in (engine.target, engine.model):
            cache = SequenceCache(engine.pool)
            cache.grow(length)
            prompt = [(9 if length < 20 else 60) + n for n in range(length)]
            output = target.forward(make_pass([(cache, prompt)], last_only=True, prefill=True, features=True))
            keys, values = (torch.cat(list(part[cache.pages]), dim=dim) for part, dim in pages_of(engine))
            assert output.features is not None
            parts = output.logits, output.hidden, output.features, keys[..., :length], values[..., :length, :]
            found.append([part.clone() for part in parts])
            cache.release()
        for padded, alone in zip(*found, strict=True):
            torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5, equal_nan=True)
        assert torch.isfinite(found[0][0]).all() == (length != 20)
    assert [count for count, _ in engine.target.prompts.passes] == [32, 16]


def pages_of(engine: Engine) -> list[tuple[torch.Tensor, int]]:
    """Keys and values of the first layer, and which dimension is the page's."""
    return [(engine.pool.layers[0].keys, -1), (engine.pool.layers[0].values, -2)]


@SLOW
@pytest.mark.skipif(DEVICE.type == "cuda", reason="it looks at the lanes within a round, which a graph does not allow")
@torch.inference_mode()
def test_drafts_need_room_in_the_pages(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane beside deeper ones still holds drafts, but was given pages for one row only."""
    monkeypatch.setattr(scheduler, "DEFAULT_ANSWER", 1)
    monkeypatch.setattr(scheduler, "MAX_DEPTH", 0)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 8}
    prompts = [PROMPTS[0], [7 + n for n in range(10)]]
    engine = device_engine(folder, head)
    plain = [answers(engine, request(prompt, max_tokens=9, **options))[0] for prompt in prompts]
    device = engine.device
    assert device is not None
    draft = device._draft

    def always_right(*args: Any) -> None:
        draft(*args)
        for lane, seat in enumerate(device._seats):
            index = [list(prompt) for prompt in prompts].index(list(seat.sequence.request.prompt))
            ahead = (prompts[index] + plain[index])[int(device.lanes.position[lane]) + 1 :]
            for step, token in enumerate(ahead[: args[1].drafts]):
                device.lanes.drafts[step, lane] = token

    monkeypatch.setattr(device, "_draft", always_right)
    engine.submit(request(prompts[0], max_tokens=None, draft="mtp", draft_tokens=2, **options), NoText())
    second = engine.submit(request(prompts[1], max_tokens=None, draft="auto", **options), NoText())
    tight = range(PAGE - 4, PAGE)  # tokens in its only page
    plainly = lambda *_: PLAIN if second.cache.length in tight else Decision("mtp", 2)  # noqa: E731
    monkeypatch.setattr(Controller, "decide", plainly)
    while len(second.answer) < 9:
        engine.step()
        assert second.cache.length <= len(second.cache.pages) * PAGE
    assert second.answer[:9] == plain[1]


@torch.inference_mode()
@pytest.mark.parametrize("where", [pytest.param("read", marks=SLOW), "round"])
def test_an_interrupted_capture_loses_nothing(
    folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While the head catches up, or before a round of another shape: the next step goes on."""
    monkeypatch.setattr(unread, "RING", 4)
    monkeypatch.setattr(device_round, "RING", 4)
    prompt, options = [5, 6, 7], {"max_tokens": 9, "temperature": 0.8, "seed": 8}
    engine = device_engine(folder, head)
    plain = answers(engine, request(prompt, **options))[0]
    decisions = iter([PLAIN] * 3 + [Decision("mtp", 2)] * (where == "round") + [PLAIN] * 20)
    monkeypatch.setattr(Controller, "decide", lambda *_: next(decisions))
    device, interrupted = engine.device, []
    assert device is not None and device.unread is not None
    place, name = (device.unread, "reading") if where == "read" else (device.graphs, "capture")
    usual = getattr(place, name)

    def idle() -> bool:
        """The lanes were cleared for the capture of a second shape."""
        return any(shape.headed for shape in device.rounds) and not device.lanes.live.any()

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


def test_plain_rounds_that_draft_tell_what_plain_decoding_costs(folder: Path) -> None:
    costs = CostTable()
    costs.learn(None, 0, 1, 0.0, 0.01)
    costs.learn_draft("mtp", 3, 0.004)
    turn = Turn(device_engine(folder, None).submit(request(PROMPTS[0]), NoText()), PLAIN, NOTHING)
    flight = Flight([turn], Shape(1, 1, True, False, 3), [0], 0.0, 0.0, 0.0, 0.0, torch.zeros(0), [], 0, True)
    for _ in range(60):
        learn_costs(costs, flight, 0.024)
    assert abs(costs.pass_seconds(1) - 0.024 / 1.4) < 0.001  # four steps of drafting take 0.4 of it


def test_a_wish_to_copy_counts_if_the_round_said_the_same() -> None:
    wish = Wish(Decision("lookup", 4), [7, 8, 9])
    assert wish.holds([7]) and wish.holds([7, 8, 9, 1]) and not wish.holds([7, 1])
    assert Wish(PLAIN, []).holds([5])
