"""Speculation is invisible: the same tokens whatever drafts, alone or in a batch, at any temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import CHUNK, PAGE, VOCAB, NoText, Scripted, decoder, engine, finish, request, run
from tiny import tiny_model

from forerun.engine.plan import Plan, Ticket
from forerun.engine.sequence import Status
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder

ODD = {"hidden_size": 72, "intermediate_size": 88, "head_dim": 20}
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"logit_bias": {17: 3.0, 40: -2.0}, "suppress": frozenset({9, 33})},
]


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 3 * CHUNK, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module", params=["int8", "float32"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """A target and a smaller draft model that agrees with it now and then."""
    quantize = request.param == "int8"
    root = tmp_path_factory.mktemp("models")
    target = tiny_model(root / "target", "llama", **ODD)
    small = tiny_model(root / "small", "llama", num_hidden_layers=1, **ODD)
    return decoder(target, quantize), decoder(small, quantize)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
@pytest.mark.parametrize("arm", ["lookup", "model"])
def test_drafting_changes_no_token(models: tuple[Decoder, Decoder], arm: str, temperature: float) -> None:
    target, small = models
    # The target as its own drafter agrees often; the small one seldom. Both must be invisible.
    drafted = accepted = 0
    for draft_model in (target, small) if arm == "model" else (None,):
        machine = engine(target, draft_model=draft_model)
        for index, prompt in enumerate(prompts(6)):
            options = {"temperature": temperature, "seed": index, **PROCESSORS[index % len(PROCESSORS)]}
            if arm == "lookup":  # two favourites, so that a random model repeats itself when it samples
                options["logit_bias"] = {20: 9.0, 21: 9.0}
            (plain,) = run(machine, request(prompt, **options))
            (other,) = run(machine, request(prompt, draft=arm, **options))
            assert other.answer == plain.answer
            drafted += other.counters.drafted
            accepted += other.counters.accepted
    assert drafted > accepted > 0


@pytest.mark.parametrize("depth", [1, 2, 5, 15])
def test_every_depth_gives_the_same_tokens(models: tuple[Decoder, Decoder], depth: int) -> None:
    target, _ = models
    machine = engine(target, draft_model=target)
    for prompt in prompts(3):
        (plain,) = run(machine, request(prompt))
        (other,) = run(machine, request(prompt, draft="model", draft_tokens=depth))
        assert other.answer == plain.answer
        # At temperature 0 a target that drafts for itself is always right: the width is used in full.
        assert other.counters.accepted == other.counters.drafted > 0


def test_alone_and_in_a_batch_of_eight(models: tuple[Decoder, Decoder]) -> None:
    target, small = models
    machine = engine(target, draft_model=small)
    mixed = []
    for index, prompt in enumerate(prompts(8)):
        arm = ("off", "lookup", "model")[index % 3]
        temperature = (0.0, 0.8)[index % 2]
        processor = PROCESSORS[index % len(PROCESSORS)]
        mixed.append(request(prompt, max_tokens=20 + 3 * index, draft=arm, temperature=temperature, **processor))
    together = [s.answer for s in run(machine, *mixed)]
    alone = [run(machine, r)[0].answer for r in mixed]
    assert together == alone


MIXED_PASS = 2  # prompts that share a pass with rows of answers


def test_prompts_share_passes_with_answers(models: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that come while answers run are read in their passes, several at once, cut anywhere."""
    wishes = [request(prompt[: 3 + 5 * n] * 3, max_tokens=12, draft="lookup") for n, prompt in enumerate(prompts(8))]
    alone = [run(engine(models[0]), wish)[0].answer for wish in wishes]
    machine, passes = engine(models[0]), []
    usual = machine.runner.start

    def watched(plan: Plan) -> Ticket:
        passes.append((len(plan.generating), len(plan.turns) - len(plan.generating)))
        return usual(plan)

    monkeypatch.setattr(machine.runner, "start", watched)
    sequences = []
    for wish in wishes:
        sequences.append(machine.submit(wish, NoText()))
        if len(sequences) > 2:
            machine.step()
    finish(machine, sequences)
    assert [sequence.answer for sequence in sequences] == alone
    assert any(turns and reading >= MIXED_PASS for turns, reading in passes), passes


@pytest.mark.parametrize("pages", [16, 30])
def test_waiting_and_parking_lose_nothing(models: tuple[Decoder, Decoder], pages: int) -> None:
    target, _ = models
    wanted = [request(prompt[:20], max_tokens=None, draft="lookup", seed=n) for n, prompt in enumerate(prompts(5))]
    free = [run(engine(target, context=100), r)[0].answer for r in wanted]
    tight = engine(target, pages=pages, context=100)
    assert [s.answer for s in run(tight, *wanted)] == free


def test_growth_parks_the_youngest_and_brings_it_back(
    models: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    target, _ = models
    wanted = [request(prompts(1)[0][:10], max_tokens=None, seed=n, temperature=1.0) for n in range(3)]
    free = [run(engine(target, context=120), r)[0].answer for r in wanted]
    machine = engine(target, pages=20, context=120)
    sequences = [machine.submit(r, NoText()) for r in wanted]
    parked = 0
    with torch.inference_mode():
        while any(s.status is not Status.FINISHED for s in sequences):
            machine.step()
            parked += sum(s.status is Status.PARKED for s in sequences)
            machine.pool.check([s.cache for s in sequences])
            for s in sequences:
                if s.status is Status.FINISHED:
                    machine.release(s)
    assert parked > 0
    assert [s.answer for s in sequences] == free


def test_garbage_truth_and_exceptions_from_a_drafter(models: tuple[Decoder, Decoder]) -> None:
    target, _ = models
    machine = engine(target)
    prompt = prompts(1)[0]
    (plain,) = run(machine, request(prompt))
    full = plain.tokens

    def boom(text: list[int], depth: int) -> list[int]:
        raise RuntimeError("no draft today")

    scripts = {
        "garbage": lambda text, depth: [(7 * len(text) + i) % VOCAB for i in range(depth)],
        "nonsense ids": lambda text, depth: [-5, 10**9][:depth],
        "too many": lambda text, depth: [5] * (depth + 40),
        "truth": lambda text, depth: full[len(text) : len(text) + depth],
        "raises": boom,
    }
    for name, script in scripts.items():
        machine.drafters.texts["lookup"] = Scripted(script)
        (other,) = run(machine, request(prompt, draft="lookup"), warned=True)
        assert other.answer == plain.answer, name
        if name == "truth":
            assert other.counters.accepted == other.counters.drafted > 0
        assert bool(other.warnings) == (name == "raises")


def test_limits_inside_a_round(models: tuple[Decoder, Decoder]) -> None:
    target, _ = models
    machine = engine(target)
    prompt = prompts(1)[0]
    (plain,) = run(machine, request(prompt, max_tokens=30))
    truth = Scripted(lambda text, depth: plain.tokens[len(text) : len(text) + depth])
    machine.drafters.texts["lookup"] = truth
    for length in range(1, 12):
        (cut,) = run(machine, request(prompt, max_tokens=length, draft="lookup", draft_tokens=7))
        assert (cut.answer, cut.finish_reason) == (plain.answer[:length], "length")
    # An end token in the middle of accepted drafts ends the answer and is not part of it.
    end = next(n for n in range(3, 30) if plain.answer[n] not in plain.answer[:n])
    (ended,) = run(machine, request(prompt, draft="lookup", draft_tokens=7, stop_ids=frozenset({plain.answer[end]})))
    assert (ended.answer, ended.finish_reason) == (plain.answer[:end], "stop")


def test_abandoned_and_continued(models: tuple[Decoder, Decoder]) -> None:
    target, small = models
    for arm in ("off", "lookup", "model"):
        machine = engine(target, draft_model=small)
        options: dict[str, Any] = {"draft": arm, "temperature": 0.7, "repetition_penalty": 1.2}
        (whole,) = run(machine, request(prompts(1)[0], max_tokens=40, **options))
        sequence = machine.submit(request(prompts(1)[0], max_tokens=40, **options), NoText())
        with torch.inference_mode():
            for _ in range(4):
                machine.step()
        machine.cancel(sequence)
        run(machine, request(prompts(2)[1], max_tokens=9))  # somebody else in between
        machine.resume(sequence)
        finish(machine, [sequence])
        assert sequence.answer == whole.answer
        # And past its length: ten now, thirty more later.
        (short,) = [machine.submit(request(prompts(1)[0], max_tokens=10, **options), NoText())]
        finish(machine, [short])
        machine.resume(short, 30)
        finish(machine, [short])
        assert short.answer == whole.answer


def test_cancellation_at_every_step_frees_everything(models: tuple[Decoder, Decoder]) -> None:
    target, small = models
    machine = engine(target, draft_model=small)
    for steps in range(8):
        sequences = [machine.submit(request(p, draft="model"), NoText()) for p in prompts(3)]
        with torch.inference_mode():
            for _ in range(steps):
                machine.step()
        for sequence in sequences:
            machine.release(sequence)
        machine.pool.check([])
        assert machine.pool.free == machine.pool.count
        assert machine.scheduler.idle


def test_what_can_never_fit_is_refused(models: tuple[Decoder, Decoder]) -> None:
    target, _ = models
    machine = engine(target, pages=4, context=200)
    with pytest.raises(ForerunError, match="context"):
        machine.submit(request([5] * 200), NoText())
    with pytest.raises(ForerunError, match="cache"):
        machine.submit(request([5] * (5 * PAGE), max_tokens=10), NoText())
    with pytest.raises(ForerunError, match="empty"):
        request([])
    with pytest.raises(ForerunError, match="--draft-model"):
        machine.submit(request([5], draft="model"), NoText())


def test_a_request_with_no_token_left_fails_alone(models: tuple[Decoder, Decoder]) -> None:
    target, _ = models
    machine = engine(target)
    good = machine.submit(request(prompts(1)[0]), NoText())
    bad = machine.submit(request(prompts(1)[0], suppress=frozenset(range(VOCAB))), NoText())
    finish(machine, [good, bad])
    assert isinstance(bad.error, ForerunError)
    assert good.error is None and len(good.answer) == 40
