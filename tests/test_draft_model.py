"""The `model` drafter at its own limits: a draft model with less context or fewer tokens than its target."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import NoText, decoder, engine, finish, request, run
from tiny import tiny_model

from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output, Pass

PROMPT = [11, 22, 33, 44, 55, 66]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1), quantize=False)


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(
    target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has angles for that many positions and no more."""
    folder = tiny_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=32)
    small, positions = decoder(folder, quantize=False), []
    usual = small.forward

    def watch(batch: Pass) -> Output:
        positions.append(batch.rows.longest)
        return usual(batch)

    monkeypatch.setattr(small, "forward", watch)
    machine = engine(target, draft_model=small)
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
    """They are looked up in a table: what lies behind its end is not to be read."""
    small = decoder(tiny_model(tmp_path, "llama", num_hidden_layers=1, vocab_size=200), quantize=False)
    machine = engine(target, draft_model=small)
    prompt = [*PROMPT, 250]
    (plain,) = run(machine, request(prompt))
    sequence = machine.submit(request(prompt, draft="model"), NoText())
    finish(machine, [sequence])
    assert sequence.answer == plain.answer and sequence.error is None
    assert [line for line in sequence.warnings if "token 250" in line and "its tokens end at 199" in line]
