"""Rejection sampling through the server: the right distribution, beside coupled requests in the same batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engines import decoder
from heads import joint
from local_engines import language_model
from serve_fakes import call, live, until
from test_sample_acceptance import chi_square, fits
from tiny import tiny_model

from forerun.engine import runner
from forerun.models.layers.decoder import Decoder
from forerun.sample import accept_rejection, draw, noise
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
PROMPT = [7, 8, 9, 7, 8]
LENGTH, REQUESTS, CHOICES = 3, 80, 16
LETTERS = (36, 37, 38, 39)  # A, B, C and D: the text tells the tokens
SETTINGS: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "logit_bias": dict.fromkeys(LETTERS, 20.0)}
REJECTION = {"draft": "model", "depth": 2, "accept": "rejection"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder(tiny_model(tmp_path_factory.mktemp("m"), "llama", **SMALL), quantize=True)


@pytest.fixture(scope="module")
def address(target: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    other = decoder(tiny_model(tmp_path_factory.mktemp("d"), "llama", seed=1, **SMALL), quantize=True)
    local = LocalEngine(ServeSettings())
    local.open(language_model(target, draft_model=other, pages=1500))
    assert local.model is not None
    service = ModelService("tiny", local, loaded=loaded_model(local.model, ServeSettings()))
    with live(create_app(service, ServeSettings())) as found:
        yield found
        until(lambda: local.state().running == 0)
    asyncio.run(local.close())


def ask(address: str, seed: int, speculative: Any, n: int = CHOICES) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "n": n, "seed": seed, "speculative": speculative, **SETTINGS}
    body["logit_bias"] = {str(token): bias for token, bias in SETTINGS["logit_bias"].items()}
    reply = call(address, "/v1/completions", body)
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def counted(answers: list[dict[str, Any]]) -> Counter[tuple[int, ...]]:
    """By token ids."""
    said = [text for answer in answers for text in texts(answer)]
    return Counter(tuple(LETTERS["ABCD".index(letter)] for letter in text) for text in said)


def test_the_distribution_is_that_of_plain_sampling(address: str, target: Decoder) -> None:
    """Beside coupled requests, which get what they get alone."""
    coupled = {**REJECTION, "accept": "coupled"}
    alone = texts(ask(address, 5, coupled))
    assert alone == texts(ask(address, 5, "off"))
    with ThreadPoolExecutor(8) as threads:
        beside = threads.map(lambda _: ask(address, 5, coupled), range(REQUESTS // 4))
        answers = list(threads.map(lambda seed: ask(address, seed, REJECTION), range(REQUESTS)))
        assert all(texts(answer) == alone for answer in beside)
    assert all(a["forerun"]["accept"] == "rejection" and a["forerun"]["guaranteed"] is False for a in answers)
    drafted, accepted = (sum(a["timings"][name] for a in answers) for name in ("draft_n", "draft_n_accepted"))
    assert drafted / 20 < accepted < 0.95 * drafted, "drafts are accepted and rejected"
    counts, expected = counted(answers), joint(target, PROMPT, LENGTH, SETTINGS)
    assert len(expected) > 8 and sum(counts.values()) == REQUESTS * CHOICES
    assert fits(counts, expected), chi_square(counts, expected)


def test_the_statistics_see_a_rule_that_is_not_exact(
    address: str, target: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that draws again from the whole distribution where it should draw from the residual."""

    def wrong(p: Any, drafts: Any, q: Any, params: Any, position: int) -> tuple[int, int]:
        accepted, final = accept_rejection(p, drafts, q, params, position)
        if accepted == len(drafts):
            return accepted, final
        return accepted, draw(p[accepted], params, position + accepted, noise.RESIDUAL)

    monkeypatch.setattr(runner, "accept_rejection", wrong)
    counts = counted([ask(address, seed, REJECTION) for seed in range(REQUESTS)])
    assert not fits(counts, joint(target, PROMPT, LENGTH, SETTINGS))


def test_figures_say_how_drafts_were_checked(address: str) -> None:
    assert ask(address, 1, {"accept": "rejection"}, n=1)["forerun"]["accept"] == "rejection"
    assert ask(address, 1, {"accept": "coupled"}, n=1)["forerun"]["accept"] == "coupled"
    assert ask(address, 1, "auto", n=1)["forerun"]["accept"] == "coupled"
    again = [texts(ask(address, 3, REJECTION)) for _ in range(2)]
    assert again[0] == again[1], "a seed gives the same text again where nothing is measured"
