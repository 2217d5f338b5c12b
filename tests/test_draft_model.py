"""The `model` drafter at its own limits: a draft model with less context or fewer tokens than its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCAB, NoText, decoder, engine, finish, pool_for, request, run
from tiny import tiny_model

from forerun.cache.pages import SequenceCache
from forerun.draft.model import ModelDrafter
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output, Pass, make_pass
from forerun.policy.decision import PLAIN, Decision

PROMPT = [11, 22, 33, 44, 55, 66]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1), quantize=False)


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has angles for that many positions and no more."""
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=32)
    machine, positions = engine(target, draft_model=decoder(folder, quantize=False)), []
    drafter = machine.drafters.rows["model"]
    assert isinstance(drafter, ModelDrafter)
    usual = drafter._target.forward

    def watch(batch: Pass) -> Output:
        positions.append(int((batch.rows.position + batch.rows.query_start.diff()).max()))
        return usual(batch)

    monkeypatch.setattr(drafter._target, "forward", watch)
    options = {"max_tokens": 60, "temperature": 0.7, "seed": 3}
    (plain,) = run(machine, request(PROMPT, **options))
    for how in ({"draft": "model", "draft_tokens": 4}, {"draft": "model"}, {"draft": "auto"}):
        (drafted,) = run(machine, request(PROMPT, **options, **how))  # type: ignore[arg-type]
        assert drafted.answer == plain.answer
    assert positions and max(positions) <= 32
    longest = max(positions)
    run(machine, request(PROMPT * 8, max_tokens=8, draft="model"))
    assert max(positions) == longest, "a prompt that is too long already is not even read"


def test_a_prompt_with_tokens_that_the_draft_model_lacks(target: Decoder, tmp_path: Path) -> None:
    """They are looked up in a table: what lies behind its end is not to be read. It reads another token instead."""
    small = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1, vocab_size=200), quantize=False)
    machine = engine(target, draft_model=small)
    for prompt in ([*PROMPT, 250], [250]):
        (plain,) = run(machine, request(prompt))
        (drafted,) = run(machine, request(prompt, draft="model"))
        assert drafted.answer == plain.answer and drafted.counters.drafted
        assert all(each.token < 200 for each in drafted.emissions if each.from_draft)


@pytest.mark.parametrize("stretch", [5, 512])
@torch.inference_mode()
def test_it_catches_up_with_what_it_has_not_followed(
    target: Decoder, tmp_path: Path, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt, rejected drafts and rounds without it: its entries are those of one pass over the text."""
    monkeypatch.setattr("forerun.engine.runner.STRETCH", stretch)
    small = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=2, seed=1), quantize=False)
    machine = engine(target, draft_model=small)
    usual = machine.policy.decide
    sequence = machine.submit(request(PROMPT * 4, max_tokens=30, draft="model", draft_tokens=3), NoText())

    def decide(asks: Any) -> list[Decision]:
        made = usual(asks)
        return [PLAIN] * len(made) if 6 <= len(sequence.answer) < 18 else made

    machine.policy.decide = decide  # type: ignore[method-assign]
    finish(machine, [sequence])
    assert sequence.counters.drafted > 20
    known = sequence.followed["model"]
    assert known.start == 0 and 30 < known.stop <= sequence.cache.length
    whole = SequenceCache(pool_for(small))
    whole.grow(known.stop)
    small.forward(make_pass([(whole, sequence.tokens[: known.stop])], last_only=True))
    for mine, own in zip(machine.pool.parts["model"], whole.pool.layers, strict=True):
        for found, expected in ((mine.keys, own.keys), (mine.values, own.values)):
            place = 2 if found is mine.values else 3
            rows = [
                each[cache.tables[layer.group].long()].movedim(place, 1).flatten(0, 1)[: known.stop]
                for each, cache, layer in ((found, sequence.cache, mine), (expected, whole, own))
            ]
            torch.testing.assert_close(*rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("prompt", [4, 40])
def test_one_whose_pages_are_given_back_on_the_way(prompt: int, follows: bool, tmp_path: Path) -> None:
    """It goes along with its target. Where it has missed text that no page holds any more, it drafts no more."""
    target, small = (
        decoder(tiny_model(tmp_path / name, "mistral", num_hidden_layers=1, sliding_window=16, seed=seed), False)
        for seed, name in enumerate("ab")
    )
    text = [(37 * n + 11) % VOCAB for n in range(prompt)]
    (plain,) = run(engine(target), request(text, max_tokens=60))
    for plainly in (0, 8, 40):
        machine = engine(target, draft_model=small)
        usual = machine.policy.decide
        if not follows:
            machine.policy.follows = lambda id: frozenset()  # type: ignore[method-assign]
        beside = machine.submit(request(text[::-1], max_tokens=70), NoText())
        sequence = machine.submit(request(text, max_tokens=60, draft="model", draft_tokens=3), NoText())

        def decide(asks: Any) -> list[Decision]:
            made = usual(asks)  # noqa: B023
            waits = len(sequence.answer) < plainly  # noqa: B023
            return [PLAIN if waits else one for one in made]

        machine.policy.decide = decide  # type: ignore[method-assign]
        finish(machine, [sequence, beside])
        assert sequence.answer == plain.answer and not sequence.warnings
        assert beside.answer == run(engine(target), request(text[::-1], max_tokens=70))[0].answer
        assert bool(sequence.counters.drafted) == (follows or prompt + plainly < 20)
