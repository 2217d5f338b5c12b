"""The mtp drafter: the same tokens whatever its head says, and a head that computes what it was trained to."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import VOCAB, NoText, decoder, engine, finish, request, run
from heads import (
    ODD,
    SHAPE,
    drafter_of,
    joint,
    mtp_engine,
    observe,
    prompts,
    random_head,
    train_head,
    write_head,
)
from tiny import tiny_model

from forerun.draft.drawing import Drawing
from forerun.draft.protocol import Draft, Want
from forerun.engine.engine import Engine
from forerun.engine.sequence import Status
from forerun.models.layers.decoder import Decoder
from forerun.sample import Row, SamplingParams, TokenHistory, choose, draw

DRAFTED = list(range(0, 300, 3))  # a reduced draft vocabulary; some ids are beyond the tokenizer's 290
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9, "repetition_penalty": 1.3},
    {"top_k": 20, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"logit_bias": {18: 3.0, 40: -2.0}, "suppress": frozenset({9, 33})},
]


@dataclass
class Trio:
    """A target and three heads for it."""

    target: Decoder
    trained: Path
    random: Path
    reduced: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    target = tiny_model(root / "target", "llama", **ODD)
    model = decoder(target, quantize=False)
    texts = [s.tokens for s in run(engine(model), *[request(prompt) for prompt in prompts(3)])]
    weights = train_head(model, texts, SHAPE)
    common = sorted({token for text in texts for token in text[-30:]} | set(DRAFTED))
    return {
        "target": target,
        "trained": write_head(root / "trained", target, SHAPE, weights),
        "random": write_head(root / "random", target, SHAPE, random_head(SHAPE)),
        "reduced": write_head(root / "reduced", target, SHAPE, weights, common),
    }


@pytest.fixture(scope="module", params=["int8", "float32"])
def trio(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Trio:
    target = decoder(folders["target"], quantize=request.param == "int8")
    return Trio(target, folders["trained"], folders["random"], folders["reduced"])


@pytest.fixture(scope="module")
def floats(folders: dict[str, Path]) -> Trio:
    """For comparisons with the twin."""
    target = decoder(folders["target"], quantize=False)
    return Trio(target, folders["trained"], folders["random"], folders["reduced"])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.2])
@pytest.mark.parametrize("head", ["trained", "random", "reduced"])
def test_drafting_changes_no_token(trio: Trio, head: str, temperature: float) -> None:
    machine = mtp_engine(trio.target, getattr(trio, head))
    drafted = accepted = 0
    for depth in range(1, 7):
        prompt = prompts(3)[depth % 3]
        # Processors make the target say what the head was not trained on: every other time it may be right.
        processors = {} if depth % 2 else PROCESSORS[depth // 2]
        options = {"temperature": temperature, "seed": depth, "max_tokens": 25, **processors}
        (plain,) = run(machine, request(prompt, **options))
        (other,) = run(machine, request(prompt, draft="mtp", draft_tokens=depth, **options))
        assert other.answer == plain.answer and not other.warnings
        drafted += other.counters.drafted
        accepted += other.counters.accepted
    assert drafted > accepted
    assert head == "random" or accepted > 10


def test_a_trained_head_is_often_right(floats: Trio) -> None:
    for head in (floats.trained, floats.reduced):
        machine = mtp_engine(floats.target, head)
        for prompt in prompts(3):
            (answer,) = run(machine, request(prompt, draft="mtp"))
            assert "mtp" in answer.counters.arms
            assert answer.counters.accepted > answer.counters.drafted / 2


def test_alone_and_in_a_mixed_batch(trio: Trio) -> None:
    machine = mtp_engine(trio.target, trio.trained, prefix_cache=False)
    mixed = []
    for index, prompt in enumerate(prompts(8)):
        arm = ("mtp", "lookup", "mtp", "off")[index % 4]
        options = {"temperature": (0.0, 0.8)[index % 2], **PROCESSORS[index % len(PROCESSORS)]}
        mixed.append(request(prompt, max_tokens=20 + 3 * index, draft=arm, **options))
    together = run(machine, *mixed)
    alone = [run(machine, r)[0] for r in mixed]
    assert [s.answer for s in together] == [s.answer for s in alone]
    assert "mtp" in together[0].counters.arms and together[0].counters.accepted > 0
    # The head saw the same, too.
    assert [s.counters.accepted for s in together] == [s.counters.accepted for s in alone]


def test_features_are_transformers_hidden_states(folders: dict[str, Path], floats: Trio) -> None:
    import transformers

    text = prompts(3)[2]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32)
    with torch.no_grad():
        states = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
    features, _ = observe(floats.target, text, (0, 2))
    torch.testing.assert_close(
        features, torch.cat([states[0][0], states[2][0], states[3][0]], dim=1), rtol=0, atol=1e-4
    )


def reduced(vocab: int, ids: torch.Tensor) -> Any:
    """What drawing asks of a drafter whose logits are those of some ids."""
    return SimpleNamespace(vocab=vocab, vocabulary=ids, deterministic=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_reduced_vocabulary_draws_with_the_noise_of_target_ids(temperature: float) -> None:
    ids = torch.tensor(DRAFTED[:97])
    logits = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(1))
    full = torch.full((3, VOCAB), -1e9)
    full[:, ids] = logits
    for settings in PROCESSORS:
        settings = {"temperature": temperature, "seed": 4, **settings}
        rows = [Row(SamplingParams(**settings), TokenHistory([5, 6]), (), 7 + n) for n in range(3)]
        drawing = Drawing([Want(n, 2, row, False) for n, row in enumerate(rows)], reduced(VOCAB, ids))
        drawing.draw(drawing.live(0), logits)
        assert [tokens[0] for tokens in drawing.tokens] == choose(full, rows, VOCAB)


def test_a_draft_ends_where_nothing_is_left_to_draft() -> None:
    ids = torch.tensor([3, 8])
    params = [SamplingParams(suppress=frozenset({3, 8})), SamplingParams(), SamplingParams(temperature=1.0)]
    wants = [Want(n, 2, Row(p, TokenHistory([1]), (), 1), n == 2) for n, p in enumerate(params)]
    drawing = Drawing(wants, reduced(10, ids))
    for depth in range(2):
        drawing.draw(live := drawing.live(depth), torch.randn(len(live), 2))
    assert [len(draft.tokens) for draft in drawing.drafts()] == [0, 2, 2]
    assert drawing.drafts()[2].probabilities is not None and drawing.drafts()[1].probabilities is None


def steps(machine: Engine, count: int) -> None:
    with torch.inference_mode():
        for _ in range(count):
            machine.step()


def test_cancelled_at_every_step_and_continued(trio: Trio) -> None:
    machine = mtp_engine(trio.target, trio.trained, prefix_cache=False)
    options: dict[str, Any] = {"draft": "mtp", "temperature": 0.7, "repetition_penalty": 1.2, "max_tokens": 20}
    (whole,) = run(machine, request(prompts(3)[2], **options))
    for count in range(9):
        sequence = machine.submit(request(prompts(3)[2], **options), NoText())
        steps(machine, count)
        machine.cancel(sequence)
        run(machine, request(prompts(2)[1], draft="mtp", max_tokens=5))  # somebody else in between
        machine.resume(sequence)
        finish(machine, [sequence])
        assert (sequence.answer, sequence.counters.accepted) == (whole.answer, whole.counters.accepted)
        machine.release(sequence)
        assert machine.pool.free == machine.pool.count


def test_longer_than_planned(trio: Trio) -> None:
    machine = mtp_engine(trio.target, trio.trained)
    (whole,) = run(machine, request(prompts(1)[0], draft="mtp", max_tokens=40))
    short = machine.submit(request(prompts(1)[0], draft="mtp", max_tokens=11), NoText())
    finish(machine, [short])
    machine.resume(short, 29)
    finish(machine, [short])
    assert short.answer == whole.answer and not short.warnings


def test_an_interrupted_target_pass_loses_nothing(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = mtp_engine(trio.target, trio.trained, prefix_cache=False)
    (whole,) = run(machine, request(prompts(3)[1], draft="mtp"))
    sequence = machine.submit(request(prompts(3)[1], draft="mtp"), NoText())
    forward = trio.target.forward
    calls = iter(range(10**6))

    def interrupted(batch: Any) -> Any:
        if next(calls) % 3 == 1:
            raise KeyboardInterrupt
        return forward(batch)

    monkeypatch.setattr(trio.target, "forward", interrupted)
    with torch.inference_mode():
        while sequence.status is not Status.FINISHED:
            with contextlib.suppress(KeyboardInterrupt):
                machine.step()
    assert (sequence.answer, sequence.counters.accepted) == (whole.answer, whole.counters.accepted)


def test_parking_takes_the_entries_of_a_head_along(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the target's pages: what comes back drafts as if it had never left."""
    monkeypatch.setattr("forerun.engine.scheduler.DEFAULT_ANSWER", 4)
    wanted = [request(prompts(2)[1], max_tokens=None, seed=n, temperature=1.0, draft="mtp") for n in range(3)]
    free = [run(mtp_engine(trio.target, trio.trained, context=110), r)[0] for r in wanted]
    machine = mtp_engine(trio.target, trio.trained, pages=20, context=110)
    sequences = [machine.submit(r, NoText()) for r in wanted]
    parked = 0
    with torch.inference_mode():
        while any(s.status is not Status.FINISHED for s in sequences):
            machine.step()
            parked += sum(s.status is Status.PARKED and s.cache.parked is not None for s in sequences)
            machine.pool.check([s.cache for s in sequences])
            for s in sequences:
                if s.status is Status.FINISHED:
                    machine.release(s)
    assert parked > 0
    assert [(s.answer, s.warnings) for s in sequences] == [(s.answer, []) for s in free]
    assert [s.counters.accepted for s in sequences] == [s.counters.accepted for s in free]


def test_a_broken_head_is_reported_and_left_out(floats: Trio, folders: dict[str, Path], tmp_path: Path) -> None:
    weights = random_head(SHAPE)
    weights["mtp.norm.weight"][3] = float("nan")
    machine = mtp_engine(floats.target, write_head(tmp_path / "nan", folders["target"], SHAPE, weights))
    (plain,) = run(machine, request(prompts(1)[0]))
    (other,) = run(machine, request(prompts(1)[0], draft="mtp"), warned=True)
    assert other.answer == plain.answer and "mtp" not in other.arms
    (warning,) = other.warnings
    assert "mtp" in warning and "not a number" in warning
    assert machine.pool.free == machine.pool.count


def test_features_are_made_only_for_those_who_want_them(floats: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = mtp_engine(floats.target, floats.trained)
    asked: list[bool] = []
    forward = floats.target.forward

    def spy(batch: Any) -> Any:
        asked.append(batch.features)
        return forward(batch)

    monkeypatch.setattr(floats.target, "forward", spy)
    run(machine, request(prompts(1)[0], max_tokens=4, draft="lookup"), request(prompts(1)[0], max_tokens=4))
    assert asked and not any(asked)
    asked.clear()
    run(machine, request(prompts(1)[0], max_tokens=4, draft="mtp"))
    assert asked and all(asked)


@pytest.mark.parametrize("head", ["trained", "reduced"])
def test_rejection_is_exact_in_distribution(floats: Trio, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_sample_acceptance import chi_square, fits

    machine = mtp_engine(floats.target, getattr(floats, head))
    settings: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "accept": "rejection"}
    prompt, length, seeds = prompts(1)[0], 3, 400
    proposals: list[tuple[Want, Draft]] = []
    drafts = Drawing.drafts

    def spy(self: Drawing) -> list[Draft]:
        made = drafts(self)
        proposals.extend(zip(self.wants, made, strict=True))
        return made

    monkeypatch.setattr(Drawing, "drafts", spy)
    wanted = [request(prompt, max_tokens=length, seed=n, draft="mtp", **settings) for n in range(seeds)]
    answers = run(machine, *wanted)
    vocabulary = drafter_of(machine).head.vocabulary
    ids = set(range(VOCAB)) if vocabulary is None else set(vocabulary.tolist())
    assert head == "trained" or len(ids) < VOCAB / 2
    for want, draft in proposals[:100]:
        q = draft.probabilities
        assert q is not None and set(q.nonzero()[:, 1].tolist()) <= ids
        torch.testing.assert_close(q.sum(1), torch.ones(len(q)).double())
        drawn = [draw(row, want.row.params, want.row.position + n) for n, row in enumerate(q)]
        assert drawn == draft.tokens  # from the very distribution that it brought along
    accepted = sum(s.counters.accepted for s in answers)
    assert seeds / 20 < accepted < sum(s.counters.drafted for s in answers)
    counts: dict[tuple[int, ...], int] = {}
    for s in answers:
        counts[tuple(s.answer)] = counts.get(tuple(s.answer), 0) + 1
    expected = joint(floats.target, prompt, length, settings)
    assert fits(counts, expected), chi_square(counts, expected)
