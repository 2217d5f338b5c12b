"""Warm equals cold: a prompt whose beginning the cache has gives the tokens and log probabilities it gives alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, VOCAB, Scripted, decoder, engine, request, run
from tiny import tiny_model
from tiny_gemma import tiny_gemma
from tiny_qwen import random_model, save_model

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence
from forerun.models.layers.decoder import Decoder

STRIDE = 16  # between recurrent states: two pages
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
MIXED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
HYBRID: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: tiny_model(folder, "llama", **SMALL),
    "windows": lambda folder: tiny_model(folder, "mistral", num_hidden_layers=1, sliding_window=12),
    "some windows": lambda folder: tiny_model(folder, "qwen2", **MIXED),
    "gemma": lambda folder: tiny_gemma(folder, "E4B"),
    "gemma experts": lambda folder: tiny_gemma(folder, "26B-A4B"),
    "hybrid": lambda folder: save_model(folder, random_model(False, **HYBRID)),
    "hybrid experts": lambda folder: save_model(folder, random_model(True, **HYBRID)),
}
TEXT = [(37 * n * n + 11 * n) % (VOCAB - 4) + 4 for n in range(200)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(FAMILIES[request.param](tmp_path_factory.mktemp("m")), quantize=True)


def warm_engine(model: Decoder, **options: Any) -> Engine:
    machine = engine(model, **options)
    machine.pool.prefix.stride = STRIDE
    return machine


def cold_engine(model: Decoder, **options: Any) -> Engine:
    return engine(model, prefix_cache=False, **options)


def wish(prompt: list[int], draft: str = "off", tokens: int = 5, **options: Any) -> Request:
    return replace(request(prompt, max_tokens=tokens, draft=draft, temperature=0.7, seed=3, **options), logprobs=2)


def said(sequence: Sequence) -> list[Any]:
    return [(emission.token, emission.logprob) for emission in sequence.emissions]


def compare(warm: Engine, cold: Engine, wish: Request) -> Sequence:
    """The warm engine's sequence, whose answer is the cold one's."""
    (mine,), (alone,) = run(warm, wish), run(cold, wish)
    assert said(mine) == said(alone), f"{mine.counters.cached} of {len(wish.prompt)} tokens were cached"
    assert alone.counters.cached == 0
    warm.pool.check([])
    assert warm.pool.free == warm.pool.count
    return mine


def test_every_length_of_a_prompt_after_a_longer_one(model: Decoder) -> None:
    warm, cold = warm_engine(model), cold_engine(model)
    compare(warm, cold, wish(TEXT[:70]))
    for length in [*range(1, 70), *range(69, 0, -1)]:
        mine = compare(warm, cold, wish(TEXT[:length], "lookup" if length % 3 else "off"))
        full = (length - 1) // PAGE * PAGE
        if model.config.delta is None:
            assert mine.counters.cached == full
        else:
            assert mine.counters.cached % STRIDE == 0 and mine.counters.cached <= full
    for length in range(33, 70):  # states were left on the way
        assert compare(warm, cold, wish(TEXT[:length])).counters.cached >= (length - 1) // STRIDE * STRIDE


def test_every_length_at_which_two_texts_part(model: Decoder) -> None:
    warm, cold = warm_engine(model), cold_engine(model)
    for length in range(1, 50):
        other = TEXT[:length] + [token ^ 1 for token in TEXT[length : length + 20]]
        mine = compare(warm, cold, wish(other))
        assert length > 1 or not mine.counters.cached
        compare(warm, cold, wish(other + TEXT[:9]))


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_a_conversation_reads_what_is_new(model: Decoder, draft: str) -> None:
    """Answers are part of the next prompt; what is computed again is less than a page, or a stride of states."""
    warm, cold, dice = warm_engine(model), cold_engine(model), random.Random(5)
    prompt, step = TEXT[:19], PAGE if model.config.delta is None else STRIDE
    known = 0
    while len(prompt) < 200:
        mine = compare(warm, cold, wish(prompt, draft, tokens=dice.randint(1, 40)))
        assert known - step < mine.counters.cached <= max(known, 0), (known, len(prompt))
        known = len(mine.tokens) - 1
        prompt = [*mine.tokens, *(dice.randrange(4, VOCAB) for _ in range(dice.randint(1, 30)))]


def test_the_last_token_of_a_prompt_is_always_computed(model: Decoder) -> None:
    warm, cold = warm_engine(model), cold_engine(model)
    for length in (2 * STRIDE, 2 * STRIDE + 1):
        for _ in range(2):
            mine = compare(warm, cold, wish(TEXT[:length]))
        step = PAGE if model.config.delta is None else STRIDE
        assert mine.counters.cached == (length - 1) // step * step


def test_prompt_log_probabilities_want_every_row(model: Decoder) -> None:
    warm, cold = warm_engine(model), cold_engine(model)
    asked = replace(wish(TEXT[:50]), prompt_logprobs=True)
    for _ in range(2):
        mine = compare(warm, cold, asked)
        (alone,) = run(cold, asked)
        assert mine.counters.cached == 0 and mine.prompt_logprobs == alone.prompt_logprobs
    assert compare(warm, cold, wish(TEXT[:50])).counters.cached > 0


def test_a_state_is_kept_in_the_middle_of_an_accepted_draft(model: Decoder) -> None:
    """Rounds of many rows step over the places where states are kept."""
    warm, cold = warm_engine(model), cold_engine(model)
    for depth, prompt in ((3, TEXT[:21]), (4, TEXT[3:30]), (7, TEXT[9:29])):
        (alone,) = run(cold, wish(prompt, tokens=50))
        right = Scripted(lambda text, count, all=alone.tokens: all[len(text) : len(text) + count])
        warm.drafters.texts["lookup"] = right
        drafted = compare(warm, cold, wish(prompt, "lookup", 50, draft_tokens=depth))
        assert drafted.counters.accepted > 20
        step = PAGE if model.config.delta is None else STRIDE
        again = compare(warm, cold, wish([*alone.tokens, 7, 8, 9]))
        assert again.counters.cached == (len(alone.tokens) - 1) // step * step
