"""Log probabilities: the raw target's, equal to the bit whoever drafts and whoever runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import NoText, Scripted, decoder, engine, finish, request
from tiny import tiny_model

from forerun.engine.request import Request
from forerun.engine.sequence import Emission
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.sample.logprobs import LEAST, likeliest_tokens, log_probabilities
from forerun.sample.parameters import SamplingParams

PROMPT = tuple((7 * n + 3) % 280 for n in range(40))  # two chunks and a half


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m"), "llama")


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return decoder(folder, quantize=False)


def wish(draft: str = "off", top: int = 3, **options: Any) -> Request:
    own = {name: options.pop(name) for name in ("draft_tokens", "accept", "prompt_logprobs") if name in options}
    prompt = options.pop("prompt", PROMPT)
    return Request(prompt, SamplingParams(**options), 16, draft=draft, logprobs=top, **own)


def emissions(machine: Any, *wishes: Request) -> list[list[Emission]]:
    sequences = [machine.submit(one, NoText()) for one in wishes]
    finish(machine, sequences)
    for sequence in sequences:
        assert sequence.error is None
        machine.release(sequence)
    return [list(sequence.emissions) for sequence in sequences]


def numbers(found: Sequence[Emission]) -> list[Any]:
    assert all(one.logprob is not None for one in found)
    return [(one.token, one.logprob) for one in found]


def reference(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities of what comes after each token, by transformers, [tokens, V] float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)


def test_against_transformers(folder: Path, target: Decoder) -> None:
    """Sampling, penalties and biases change which token is chosen, and not how likely the target finds it."""
    wild = wish(top=5, temperature=1.3, seed=4, repetition_penalty=1.4, logit_bias={17: 4.0}, prompt_logprobs=True)
    machine = engine(target)
    sequence = machine.submit(wild, NoText())
    finish(machine, [sequence])
    expected = reference(folder, sequence.tokens)
    assert len(sequence.prompt_logprobs) == len(PROMPT) - 1
    found = [*sequence.prompt_logprobs, *(one.logprob for one in sequence.emissions)]
    for place, (token, logprob) in enumerate(zip(sequence.tokens[1:], found, strict=True)):
        assert logprob is not None
        row = expected[place]
        assert logprob.value == pytest.approx(float(row[token]), abs=2e-4)
        best = row[:290].topk(5)
        assert [one for one, _ in logprob.top] == best.indices.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5, "top_k": 40}])
def test_equal_to_the_bit_with_and_without_drafts_alone_and_beside_others(
    target: Decoder, options: dict[str, Any]
) -> None:
    (alone,) = emissions(engine(target), wish(**options))
    truth = [one.token for one in alone]

    def half_right(text: list[int], depth: int) -> list[int]:
        """Two drafts of what comes, then one that is wrong."""
        place = len(text) - len(PROMPT)
        return [*truth[place : place + 2], 5][:depth]

    machine = engine(target)
    machine.drafters.texts["lookup"] = Scripted(half_right)
    (drafted,) = emissions(machine, wish("lookup", draft_tokens=3, **options))
    assert sum(one.from_draft for one in drafted) >= 6
    assert numbers(drafted) == numbers(alone)
    others = [wish("lookup", prompt=PROMPT[n:], seed=n, temperature=0.7) for n in range(1, 6)]
    crowd = emissions(engine(target), *others[:3], wish(**options), *others[3:])
    assert numbers(crowd[3]) == numbers(alone)


@pytest.mark.parametrize("quantize", [False, True])
def test_an_answer_has_those_of_one_pass_over_the_whole_text(folder: Path, quantize: bool) -> None:
    """On a CPU there is one kind of row: what was emitted, drafted or not, is scored in a prompt with the same bits."""
    model = decoder(folder, quantize=quantize)
    for options in ({"temperature": 0.0}, {"temperature": 1.1, "seed": 5}):
        for draft in ("off", "lookup"):
            (answer,) = emissions(engine(model), wish(draft, **options))
            tokens = (*PROMPT, *(one.token for one in answer))
            machine = engine(model)
            sequence = machine.submit(wish(prompt=tokens, prompt_logprobs=True, **options), NoText())
            finish(machine, [sequence])
            scored = sequence.prompt_logprobs[len(PROMPT) - 1 :]
            assert [one.logprob for one in answer] == list(scored), (options, draft)


def test_of_the_prompt_alone_and_beside_others(target: Decoder) -> None:
    """And reading them changes nothing of the answer."""
    asked = wish(prompt_logprobs=True)
    machine = engine(target)
    sequences = [machine.submit(one, NoText()) for one in (asked, wish("lookup", prompt=PROMPT[3:]))]
    finish(machine, sequences)
    single = engine(target)
    alone = single.submit(asked, NoText())
    finish(single, [alone])
    assert alone.prompt_logprobs == sequences[0].prompt_logprobs and len(alone.prompt_logprobs) == len(PROMPT) - 1
    (plain,) = emissions(engine(target), wish())
    assert numbers(list(alone.emissions)) == numbers(list(sequences[0].emissions)) == numbers(plain)


def test_rejection_sampling_has_them_too(target: Decoder) -> None:
    (found,) = emissions(engine(target), wish("lookup", accept="rejection", temperature=0.8))
    assert all(one.logprob is not None and len(one.logprob.top) == 3 for one in found)


def test_none_where_nobody_asked(target: Decoder) -> None:
    (found,) = emissions(engine(target), request(PROMPT, max_tokens=4))
    assert [one.logprob for one in found] == [None] * 4
    with pytest.raises(ForerunError, match="logprobs"):
        wish(top=21)


def test_ties_go_to_the_lower_id_at_the_cut_too() -> None:
    logits = np.array([1, 3, 3, 0, 3, 2], dtype=np.float32)
    assert likeliest_tokens(logits, 2) == [1, 2] and likeliest_tokens(logits, 4) == [1, 2, 4, 5]
    assert likeliest_tokens(logits, 9) == [1, 2, 4, 5, 0, 3] and likeliest_tokens(logits, 0) == []


def test_numbers_are_finite_whatever_the_logits() -> None:
    value, top = log_probabilities(np.array([0, -np.inf, 1e30], dtype=np.float32), 1, 3, 3)
    assert value == LEAST and [one for one, _ in top] == [2, 0, 1] and top[0][1] == 0.0
    for bad in (np.nan, np.inf):
        with pytest.raises(ForerunError, match="not a number"):
            log_probabilities(np.array([0, bad], dtype=np.float32), 0, 1, 2)
    with pytest.raises(ForerunError, match="not a number"):
        log_probabilities(np.full(3, -np.inf, dtype=np.float32), 0, 1, 2)
