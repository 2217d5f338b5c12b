"""The engine on a device, or in the interpreter: rounds are planned ahead and give the tokens of plain decoding."""

from __future__ import annotations

import time
from dataclasses import replace
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
    runner_of,
    tell,
    tiny_folder,
    tiny_head,
)
from engines import NoText, Scripted, finish, request, run
from tiny_qwen import tiny_qwen

from forerun.cache.pages import PagePool
from forerun.engine.probe import probe
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.gpu import filtering
from forerun.models.families import build
from forerun.models.layers.rows import Output, Pass
from forerun.policy.decision import PLAIN, Decision
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint

# Rows that belong to no sequence may overflow; the interpreter says so.
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
def test_drafts_change_no_token(folder: Path, head: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": temperature, "seed": 11}
    engine = device_engine(folder, head)
    plain = [answers(engine, request(prompt, **options))[0] for prompt in SOME]
    assert answers(engine, *(request(prompt, **options) for prompt in SOME)) == plain
    drafted = [request(prompt, draft="mtp", draft_tokens=2, **options) for prompt in SOME]
    assert answers(engine, drafted[0]) == plain[:1]
    together = run(engine, *drafted)
    assert [sequence.answer for sequence in together] == plain
    assert all(sequence.counters.drafted for sequence in together)


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


def test_drafts_of_the_host_are_run_on_the_device(folder: Path, head: Path) -> None:
    """Alone, or beside sequences whose drafts come from the head or that have none."""
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 6}
    engine = device_engine(folder, head)
    plain = [answers(engine, request(prompt, **options))[0] for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, plain, strict=True)]

    def mostly_right(tokens: list[int], depth: int) -> list[int]:
        whole = next(text for text in texts if text[: len(tokens)] == tokens)
        ahead = whole[len(tokens) : len(tokens) + depth]
        return [*ahead[:-1], 3] if len(tokens) % 3 == 0 else ahead

    engine.drafters.texts["lookup"] = Scripted(mostly_right)
    (alone,) = run(engine, request(PROMPTS[1], draft="lookup", draft_tokens=5, **options))
    assert alone.answer == plain[1] and alone.counters.rounds < TOKENS // 2
    arms = [("off", None), ("lookup", 3), ("mtp", 2)]
    wishes = [
        request(prompt, draft=arm, draft_tokens=depth, **options)
        for prompt, (arm, depth) in zip(PROMPTS, arms, strict=True)
    ]
    before = time.perf_counter()
    together = run(engine, *wishes)
    passed = time.perf_counter() - before
    if DEVICE.type == "cuda":
        assert all(0 < sequence.counters.decode_seconds < passed for sequence in together)
    assert [sequence.answer for sequence in together] == plain
    assert together[0].counters.drafted == 0 and together[1].counters.accepted > 0 < together[2].counters.drafted


@pytest.mark.parametrize("gathered", [pytest.param(1024, marks=SLOW), 64])
def test_filters_on_the_device(folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, gathered: int) -> None:
    """With little room for tokens the device leaves rows open, that of a first token too: the host decides."""
    ways: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 7, "top_p": 0.8}, {"min_p": 0.3}]
    options: dict[str, Any] = {"max_tokens": 7, "temperature": 0.8, "seed": 4}
    wishes = [(prompt, {**options, **way}) for prompt, way in zip(PROMPTS, ways, strict=True)]
    host = [replace(request(prompt, **wish), logprobs=0) for prompt, wish in wishes]
    plain = [answers(device_engine(folder, None), one)[0] for one in host]
    monkeypatch.setattr(filtering, "GATHERED", gathered)
    engine, left = device_engine(folder, head), []
    take = engine._take
    monkeypatch.setattr(engine, "_take", lambda outcome: left.append(outcome.by_host) or take(outcome))
    assert answers(engine, *(request(prompt, draft="mtp", draft_tokens=2, **wish) for prompt, wish in wishes)) == plain
    assert any(shape.filtered for shape in runner_of(engine)._rounds)
    assert any(left) == (gathered < 290) and not all(left)


def test_cancelled_while_a_round_is_under_way_and_taken_up_again(folder: Path, head: Path) -> None:
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


def test_the_policy_decides_while_a_round_runs(folder: Path, head: Path) -> None:
    """What it wants then is done in the next round."""
    engine, under_way = device_engine(folder, head), []
    plain = answers(engine, request(PROMPTS[0], max_tokens=10))[0]
    wishes = [PLAIN, Decision("mtp", 1), Decision("mtp", 1), Decision("mtp", 2), *[PLAIN] * 12]
    tell(engine, lambda _: under_way.append(engine._under_way is not None) or wishes[len(under_way) - 1])
    runner, widths = runner_of(engine), []
    launch = runner._launch
    runner._launch = lambda *work: widths.append(work[1][0].width) or launch(*work)  # type: ignore[method-assign]
    (sequence,) = run(engine, request(PROMPTS[0], max_tokens=10, draft="auto"))
    assert sequence.answer == plain
    assert all(under_way[:4]) and widths[1:5] == [1, 2, 2, 3]


def spoiled(usual: Any, poison: int, batch: Pass) -> Output:
    """No numbers come out of generated rows of one token."""
    output = usual(batch)
    tables, wanted = batch.rows.tables, batch.wanted
    assert tables is not None and wanted is not None
    bad = (batch.tokens == poison) & (tables.at >= len(PROMPTS[0]))
    return Output(output.logits.masked_fill(bad[wanted][:, None], float("nan")), output.features)


def test_a_bad_row_ends_an_answer_where_plain_decoding_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before it that were drafted and accepted are emitted; the error comes after them."""
    (plain,) = answers(device_engine(folder, None), request(PROMPTS[0], max_tokens=6))
    poison = plain[2]
    assert poison not in (*PROMPTS[0], *plain[:2])
    text = [*PROMPTS[0], *plain]
    monkeypatch.setattr("device_engines.Lookup", lambda: Scripted(lambda said, depth: text[len(said) :][:depth]))
    for wish in ({"draft": "off"}, {"draft": "lookup", "draft_tokens": 3}):
        for logprobs in (None, 0):  # chosen by the device, and by the host
            engine = device_engine(folder, None)
            monkeypatch.setattr(engine.model, "forward", partial(spoiled, engine.model.forward, poison))
            asked = replace(request(PROMPTS[0], max_tokens=6, **wish), logprobs=logprobs)
            sequence = engine.submit(asked, NoText())
            finish(engine, [sequence])
            assert "infinite or not a number" in str(sequence.error)
            assert bool(sequence.counters.accepted) == (wish["draft"] != "off")
            assert sequence.answer == plain[:3], "all that came before"
            engine.release(sequence)
            engine.pool.check([])


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=SLOW)])
def test_the_probe_runs_on_a_device(folder: Path, tmp_path: Path, kind: str) -> None:
    """It leaves nothing behind."""
    path = folder if kind == "llama" else tiny_qwen(tmp_path)
    decoder = build(open_checkpoint(path), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, 20, PAGE, torch.float32, DEVICE, slots=2, on_device=True)
    assert probe(decoder, pool, [2, 3]).guaranteed
    pool.check([])
