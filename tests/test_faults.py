"""What fails, fails alone: its own request ends with the error, the others get their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import VOCAB, NoText, Scripted, decoder, engine, finish, request, run
from rules import ByRule
from tiny import tiny_model

from forerun.draft.protocol import Draft, Want
from forerun.models.layers.decoder import Decoder

WISHES = [request([5 + n, 6, 7, 8] * 6, max_tokens=12, draft="lookup") for n in range(3)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", num_hidden_layers=1), quantize=False)


@pytest.fixture(scope="module")
def alone(target: Decoder) -> list[list[int]]:
    return [run(engine(target), wish)[0].answer for wish in WISHES]


class Silent(NoText):
    """A sink that fails at its third token."""

    left = 2

    def push(self, token: int) -> tuple[str, bool]:
        self.left -= 1
        if self.left < 0:
            raise OSError("nobody reads")
        return super().push(token)


def test_a_sink(target: Decoder, alone: list[list[int]]) -> None:
    machine = engine(target)
    sequences = [machine.submit(wish, Silent() if n == 1 else NoText()) for n, wish in enumerate(WISHES)]
    finish(machine, sequences)
    assert isinstance(sequences[1].error, OSError) and sequences[1].answer == alone[1][:3]
    assert [sequences[0].answer, sequences[2].answer] == [alone[0], alone[2]]
    assert [s.error for s in sequences[::2]] == [None, None]


@pytest.mark.parametrize("prompt", [True, False])
def test_a_pass(target: Decoder, alone: list[list[int]], prompt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot be computed fails, in its prompt or in a round with others; nobody is asked for it again."""
    machine = engine(target)
    usual, raised = machine.runner.target.forward, []
    sequences = [machine.submit(wish, NoText()) for wish in WISHES]

    def forward(batch: Any) -> Any:
        due = not sequences[1].answer if prompt else len(sequences[1].answer) > 3
        mine = sequences[1].cache.pages[:1] if due else []
        if mine and mine[0] in batch.rows.block_tables[0][:, 0].tolist():
            raised.append(len(batch.tokens))
            raise RuntimeError("no pass")
        return usual(batch)

    monkeypatch.setattr(machine.runner.target, "forward", forward)
    finish(machine, sequences)
    assert raised and isinstance(sequences[1].error, RuntimeError)
    assert sequences[1].answer == alone[1][: len(sequences[1].answer)]
    assert [sequences[0].answer, sequences[2].answer] == [alone[0], alone[2]]
    assert len(raised) <= 3  # the batch, and that one alone


def test_keeping_rows(target: Decoder, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever steps does not get the exception of another's cache."""
    machine = engine(target)
    sequences = [machine.submit(wish, NoText()) for wish in WISHES]
    while len(sequences[1].answer) < 3:
        machine.step()

    def commit(*_: Any) -> None:
        raise RuntimeError("no rows")

    monkeypatch.setattr(sequences[1].cache, "commit", commit)
    finish(machine, sequences)
    assert isinstance(sequences[1].error, RuntimeError)
    assert [sequences[0].answer, sequences[2].answer] == [alone[0], alone[2]]


LIES = {
    "no draft": None,
    "no tokens": Draft(None),  # type: ignore[arg-type]
    "numbers that are no ids": Draft([1.5, 2.5]),  # type: ignore[list-item]
    "text": Draft(["a", "b"]),  # type: ignore[list-item]
    "a distribution too few": Draft([5, 6], torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)),
}


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("lie", LIES)
def test_what_a_drafter_says_is_never_trusted(target: Decoder, alone: list[list[int]], lie: str, accept: str) -> None:
    """It is switched off for whom it lied to."""

    class Liar(Scripted):
        def propose(self, wants: list[Want]) -> list[Draft]:
            return [LIES[lie] if want.sequence_id == 1 else Draft([]) for want in wants]  # type: ignore[misc]

    machine = engine(target)
    machine.drafters.texts["lookup"] = Liar(None)
    wishes = [request(wish.prompt, max_tokens=12, draft="lookup", accept=accept) for wish in WISHES]
    sequences = [machine.submit(wish, NoText()) for wish in wishes]
    finish(machine, sequences)
    assert [s.answer for s in sequences] == alone and [s.error for s in sequences] == [None] * 3
    assert [bool(s.warnings) for s in sequences] == [False, True, False]


def test_ids_of_a_drafter_become_plain_numbers(target: Decoder, alone: list[list[int]]) -> None:
    """Whatever counts as one: they are emitted, and written as JSON."""
    machine, text = engine(target), [*WISHES[0].prompt, *alone[0]]
    machine.drafters.texts["lookup"] = Scripted(lambda said, depth: list(np.array(text[len(said) :][:depth])))
    (sequence,) = run(machine, WISHES[0])
    assert sequence.counters.accepted and sequence.answer == alone[0]
    assert {type(token) for token in sequence.answer} == {int}


def test_a_mask_that_is_none(target: Decoder, alone: list[list[int]]) -> None:
    """It is met when tokens are chosen for all."""

    class Odd(ByRule):
        def masks(self, drafts: Any) -> Any:
            return [object()] * (1 + len(drafts)) if len(self.answer) > 2 else super().masks(drafts)

    machine, rule = engine(target), Odd(lambda _: range(4, VOCAB), VOCAB)
    sequences = [machine.submit(wish, NoText(), rule if n == 1 else None) for n, wish in enumerate(WISHES)]
    finish(machine, sequences)
    assert isinstance(sequences[1].error, TypeError) and len(sequences[1].answer) > 2
    assert [sequences[0].answer, sequences[2].answer] == [alone[0], alone[2]]


def test_the_error_is_raised_where_its_answer_is_read(tmp_path: Path) -> None:
    import forerun

    model = forerun.load(str(tiny_model(tmp_path, "llama", num_hidden_layers=1)), dtype="float32")
    good, bad = (forerun.stream(model, text, max_tokens=8, draft="off", raw=True) for text in ("a b c", "d e f"))

    def push(token: int) -> tuple[str, bool]:
        raise OSError("nobody reads")

    bad.sequence.sink.push = push  # type: ignore[method-assign]
    assert len([chunk for chunk in good if chunk.token is not None]) == 8
    with pytest.raises(OSError, match="nobody reads"):
        next(bad)
    for answer in (good, bad):
        answer.close()
