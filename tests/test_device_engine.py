"""The engine on a device, or in Triton's interpreter: whole rounds in one launch give the tokens of the general way."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import (
    DEVICE,
    PAGE,
    PROMPTS,
    SLOW,
    SOME,
    TOKENS,
    answers,
    device_engine,
    device_of,
    tiny_folder,
    tiny_head,
)
from engines import CONTEXT, NoText, Scripted, finish, request, run
from tiny_qwen import tiny_qwen

from forerun.cache.pages import PagePool
from forerun.engine.graphs import GraphedTarget
from forerun.engine.plan import Turn
from forerun.engine.probe import probe
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu import filtering
from forerun.loading import graphed
from forerun.models.families import build
from forerun.models.layers.rows import Output, Pass
from forerun.policy.controller import Controller
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
        engine.submit(request(PROMPTS[1], draft="mtp", repetition_penalty=1.2, temperature=0.9, **options), NoText()),
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
        raise AssertionError("the host's way")

    engine.drafters.by_name["lookup"] = Scripted(mostly_right)
    monkeypatch.setattr("forerun.engine.host.HostExecutor.run", never)
    (alone,) = run(engine, request(PROMPTS[1], draft="lookup", draft_tokens=5, **options))
    assert alone.answer == plain[1] and alone.counters.rounds < TOKENS // 2
    assert any(shape.width == 8 and not shape.drafts for shape in device_of(engine).rounds)
    arms = [("off", None), ("lookup", 3), ("mtp", 2)]
    wishes = [
        request(prompt, draft=arm, draft_tokens=depth, **options)
        for prompt, (arm, depth) in zip(PROMPTS, arms, strict=True)
    ]
    before = time.perf_counter()
    together = run(engine, *wishes)
    passed = time.perf_counter() - before
    assert all(0 < sequence.counters.decode_seconds < passed for sequence in together)
    assert [sequence.answer for sequence in together] == plain
    assert together[0].counters.drafted == 0 and together[1].counters.accepted > 0 < together[2].counters.drafted


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
    left = []
    take = engine._take
    monkeypatch.setattr(engine, "_take", lambda result: left.append(result.accepted) or take(result))
    assert answers(engine, *(request(prompt, draft="mtp", draft_tokens=2, **wish) for prompt, wish in wishes)) == plain
    assert any(shape.filtered for shape in device_of(engine).rounds)
    assert (min(left) < 0) == (gathered < 290)


def test_cancelled_in_the_air_and_taken_up_again(folder: Path, head: Path) -> None:
    engine, wish = device_engine(folder, head), request(PROMPTS[0], max_tokens=TOKENS, draft="mtp", draft_tokens=2)
    whole = answers(engine, wish)[0]
    sequence = engine.submit(wish, NoText())
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
        assert engine._under_way is not None
        engine.cancel(sequence)
        assert engine._under_way is None and sequence.answer == whole[: len(sequence.answer)]
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
    """While every round runs, but the last before the end: what it wants then is done in the next round."""
    engine, asked = device_engine(folder, head), []
    plain = answers(engine, request(PROMPTS[0], max_tokens=10))[0]
    wishes = [PLAIN, Decision("mtp", 1), Decision("mtp", 1), Decision("mtp", 2), *[PLAIN] * 9]

    def decide(controller: Controller, limit: int, available: dict[str, bool], others: int) -> Decision:
        assert limit and available["mtp"] and not others
        asked.append(engine._under_way is not None)
        return wishes[len(asked) - 1]

    monkeypatch.setattr(Controller, "decide", decide)
    rounds = device_of(engine).rounds
    widths, launch = [], rounds.launch
    monkeypatch.setattr(rounds, "launch", lambda shape: widths.append(shape.width) or launch(shape))
    (sequence,) = run(engine, request(PROMPTS[0], max_tokens=10, draft="auto"))
    assert sequence.answer == plain
    assert asked[:4] == [False, True, True, True]
    assert widths[:4] == [1, 2, 2, 3]


def spoiled(usual: Callable[[Pass], Output], poison: int, batch: Pass) -> Output:
    """No numbers come out of the rows of one token."""
    output = usual(batch)
    if batch.prefill:
        return output
    return Output(output.logits.masked_fill((batch.tokens == poison)[:, None], float("nan")), output.features)


def test_a_bad_row_ends_an_answer_where_the_host_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before it that were drafted and accepted are emitted; the error comes after them."""
    wish = {"max_tokens": 6, "draft": "lookup", "draft_tokens": 3}
    (plain,) = answers(device_engine(folder, None, rounds=False), request(PROMPTS[0], max_tokens=6))
    poison = plain[2]
    assert poison not in (*PROMPTS[0], *plain[:2])
    text = [*PROMPTS[0], *plain]
    monkeypatch.setattr("device_engines.Lookup", lambda: Scripted(lambda said, depth: text[len(said) :][:depth]))
    for rounds in (False, True):
        engine = device_engine(folder, None, rounds=rounds)
        monkeypatch.setattr(engine.model, "forward", partial(spoiled, engine.model.forward, poison))
        sequence = engine.submit(request(PROMPTS[0], **wish), NoText())
        finish(engine, [sequence])
        assert "infinite or not a number" in str(sequence.error) and sequence.counters.accepted
        assert sequence.answer == plain[:3], "all that came before"
        engine.release(sequence)
        engine.pool.check([])


@SLOW
def test_a_pass_is_narrowed_where_products_change_bits(folder: Path, head: Path) -> None:
    """Whole rounds of one sequence go on; rounds of several take the general way, in passes they may have."""
    options: dict[str, Any] = {"max_tokens": 9, "draft": "mtp", "draft_tokens": 2, "temperature": 0.8, "seed": 5}
    engine = device_engine(folder, head)
    alone = [answers(engine, request(prompt, **options))[0] for prompt in PROMPTS]
    device = device_of(engine)
    target = device.target
    assert list(device.rounds) and isinstance(target, GraphedTarget)
    target.counts.keep_bits = lambda rows: rows <= 3  # type: ignore[method-assign]
    assert answers(engine, *(request(prompt, **options) for prompt in PROMPTS)) == alone
    assert all(shape.slots == 1 for shape in device.rounds)
    assert target.passes and all(lanes == 1 for lanes, _, _ in target.passes)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=SLOW)])
def test_the_probe_runs_through_the_graphs(folder: Path, tmp_path: Path, kind: str) -> None:
    """Its first tokens are a prefill chunk, the others go through captured passes; it leaves nothing behind."""
    path = folder if kind == "llama" else tiny_qwen(tmp_path)
    decoder = build(open_checkpoint(path), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, 20, PAGE, torch.float32, DEVICE, slots=2, on_device=True)
    target = graphed(decoder, pool, CONTEXT)
    assert probe(decoder, pool, [2, 3], target, target.counts).guaranteed
    pool.check([])
    assert target.counts.keep_bits(2)


def test_a_wish_to_copy_counts_if_the_round_said_the_same() -> None:
    turn = Turn(None, Decision("lookup", 4), expected=[7, 8, 9])  # type: ignore[arg-type]
    assert turn.holds_after([7]) and turn.holds_after([7, 8, 9, 1]) and not turn.holds_after([7, 1])
    assert Turn(None, PLAIN).holds_after([5])  # type: ignore[arg-type]
