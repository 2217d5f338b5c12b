"""The real model: speculation on and off give the same tokens, alone and in a batch, in both precisions."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from prompts import PROMPTS
from safetensors import safe_open
from safetensors.torch import save_file
from serve_fakes import live

import forerun
from forerun.conversion import convert
from forerun.language_model import LanguageModel
from forerun.response import Chunk, Response
from forerun.serve.app import create_app
from forerun.serve.local_engine import LocalEngine
from forerun.serve.model_service import ModelService, loaded_model
from forerun.serve.settings import ServeSettings
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.find import find

pytestmark = pytest.mark.real

PROCESSORS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 40, "min_p": 0.02},
    {"repetition_penalty": 1.15},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {504: 2.0, 28: -1.0}, "suppress": [198]},
    {"lang_bias": "ru=-inf,zh=-5", "stop": ["\n\n"]},
]
TEMPERATURES = [0.0, 0.7, 1.2]
LENGTH = 24


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model: the built-in one with a third of its layers, enough to be right now and then."""
    target = tmp_path_factory.mktemp("draft")
    source = convert("smollm2", target / "whole").folder
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = 10
    (target / "config.json").write_text(json.dumps(config))
    for file in source.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())
    with safe_open(source / "model.safetensors", "pt") as weights:
        names = [n for n in weights.keys() if ".layers." not in n or int(n.split(".")[2]) < 10]  # noqa: SIM118
        save_file({name: weights.get_tensor(name) for name in names}, target / "model.safetensors", {"format": "pt"})
    return str(target)


@pytest.fixture(scope="session")
def int8(draft_folder: str) -> LanguageModel:
    return forerun.load("smollm2", draft_model=draft_folder)


@pytest.fixture(scope="session")
def float32(draft_folder: str) -> LanguageModel:
    return forerun.load("smollm2", dtype="float32", quantize="none", draft_model=draft_folder)


def options(index: int, temperature: float) -> dict[str, Any]:
    return {"max_tokens": LENGTH, "temperature": temperature, "seed": index, **PROCESSORS[index % len(PROCESSORS)]}


def compare(
    model: LanguageModel, prompts: list[tuple[int, str]], temperatures: list[float], together: bool = False
) -> dict[str, int]:
    """All arms on all prompts, one after another or together in a batch; drafts accepted by arm."""
    accepted = {"lookup": 0, "model": 0, "mtp": 0, "auto": 0}
    for index, prompt in prompts:
        for temperature in temperatures:
            settings = options(index, temperature)
            plain = forerun.generate(model, prompt, draft="off", **settings)
            answers = [forerun.stream(model, prompt, draft=arm, **settings) for arm in accepted] if together else []
            for number, arm in enumerate(accepted):
                other = last(answers[number] if together else forerun.stream(model, prompt, draft=arm, **settings))
                assert other.tokens == plain.tokens, f"{arm} at temperature {temperature} changed {prompt!r}"
                assert other.text == plain.text and other.guaranteed
                accepted[arm] += other.accepted
    return accepted


def last(generation: Iterable[Chunk]) -> Response:
    """The answer of a generation, which may advance together with others."""
    *_, chunk = generation
    assert chunk.response is not None
    return chunk.response


CASES = list(enumerate(PROMPTS))
FEW = [CASES[i] for i in (0, 8, 17, 23, 38, 6)]


def test_six_prompts_all_arms(int8: LanguageModel) -> None:
    assert min(compare(int8, FEW, TEMPERATURES).values()) > 0


def test_six_prompts_full_precision(float32: LanguageModel) -> None:
    assert min(compare(float32, FEW, [0.0, 0.7]).values()) > 0


@pytest.mark.long
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_fifty_prompts_all_arms(precision: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(precision)
    assert min(compare(model, CASES, TEMPERATURES, together=True).values()) > 0


def test_alone_and_in_a_batch(int8: LanguageModel) -> None:
    wanted = []
    for index, prompt in CASES[4:12]:
        arm = ("off", "lookup", "model", "mtp")[index % 4]
        wanted.append((prompt, {"draft": arm, **options(index, TEMPERATURES[index % 3])}))
    alone = [forerun.generate(int8, prompt, **settings) for prompt, settings in wanted]
    running = [forerun.stream(int8, prompt, **settings) for prompt, settings in wanted]
    together = [last(generation) for generation in running]  # iterating one advances them all
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.text for r in together] == [r.text for r in alone]


COUNTRIES = (
    "France Italy Spain Germany Japan China India Brazil Canada Mexico Egypt Kenya Peru Chile Norway Sweden Finland "
    "Poland Greece Turkey Iran Iraq Cuba Nepal Vietnam Thailand Portugal Austria Hungary Ireland Scotland Belgium "
    "Denmark Iceland Russia Ukraine Argentina Colombia Australia Indonesia"
)


def test_forty_chats_without_a_maximum_run_at_once() -> None:
    """Over HTTP, in a cache of eight contexts: none is refused or waits, and each says what it says alone."""
    model, countries = forerun.load("smollm2", max_context=8192), COUNTRIES.split()
    local = LocalEngine(ServeSettings())
    local.open(model)
    service = ModelService("smollm2", local, loaded=loaded_model(model, ServeSettings()))

    def ask(country: str) -> str:
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        body = json.dumps({"messages": [question], "temperature": 0}).encode()
        call = Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urlopen(call, timeout=600) as reply:
            text: str = json.load(reply)["choices"][0]["message"]["content"]
        return text

    with live(create_app(service, ServeSettings())) as address:
        alone = [ask(country) for country in countries]
        most = 0
        with ThreadPoolExecutor(len(countries)) as threads:
            asked = [threads.submit(ask, country) for country in countries]
            while not all(one.done() for one in asked):
                most = max(most, local.state().running)
                time.sleep(0.005)
        assert [one.result() for one in asked] == alone and most == len(countries) == 40
    asyncio.run(local.close())


def test_rejection_runs_and_is_not_called_guaranteed(int8: LanguageModel) -> None:
    for arm in ("lookup", "model", "mtp"):
        answer = forerun.generate(
            int8, PROMPTS[8], max_tokens=30, temperature=0.8, seed=3, draft=arm, accept="rejection"
        )
        assert answer.completion_tokens > 0 and not answer.guaranteed
        cold = forerun.generate(int8, PROMPTS[8], max_tokens=30, draft=arm, accept="rejection")
        assert cold.tokens == forerun.generate(int8, PROMPTS[8], max_tokens=30, draft="off").tokens


def reading_text() -> str:
    """English prose that every Python carries."""
    import argparse
    import asyncio
    import decimal
    import difflib
    import doctest
    import heapq
    import pickle
    import random
    import string

    modules = [argparse, asyncio, decimal, difflib, doctest, heapq, pickle, random, string]
    return "\n".join(
        [*(module.__doc__ or "" for module in modules), heapq.__about__, difflib.SequenceMatcher.__doc__ or ""]
    )


@torch.inference_mode()
def perplexity(model: LanguageModel, tokens: list[int]) -> float:
    """exp of the mean negative log-likelihood, through the passes that decode."""
    from forerun.cache.pages import SequenceCache
    from forerun.engine.probe import step

    cache = SequenceCache(model.engine.pool)
    cache.grow(len(tokens))
    losses = []
    for start in range(0, len(tokens) - 1, 16):
        rows = tokens[start : min(start + 16, len(tokens) - 1)]
        logits = step(model.engine.model, [cache], [rows])
        targets = torch.tensor(tokens[start + 1 : start + 1 + len(rows)])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    cache.release()
    return float(torch.cat(losses).mean().exp())


def test_int8_costs_less_than_one_percent_of_perplexity(int8: LanguageModel, float32: LanguageModel) -> None:
    tokens = list(int8.tokenizer(reading_text())["input_ids"])[:2000]
    assert len(tokens) == 2000
    small, full = perplexity(int8, tokens), perplexity(float32, tokens)
    print(f"perplexity: int8 {small:.3f}, float32 {full:.3f}")
    assert 5 < full < 100, "the model reads this text badly: the measure is broken"
    assert small < 1.01 * full


def test_logits_agree_with_transformers(float32: LanguageModel, draft_folder: str) -> None:
    from transformers import AutoModelForCausalLM

    tokens = list(float32.tokenizer(PROMPTS[6])["input_ids"])
    oracle = AutoModelForCausalLM.from_pretrained(Path(draft_folder, "whole"), dtype=torch.float32)
    checkpoint = open_checkpoint(find("smollm2"))  # whose values a conversion has in float16
    exact = {name: checkpoint.floats(name, checkpoint.shape(name)) for name in checkpoint.names()}
    assert not oracle.load_state_dict(exact, strict=False).unexpected_keys
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
        from forerun.cache.pages import SequenceCache
        from forerun.engine.probe import step

        cache = SequenceCache(float32.engine.pool)
        cache.grow(len(tokens))
        mine = step(float32.engine.model, [cache], [tokens])
        cache.release()
    torch.testing.assert_close(mine, expected, atol=2e-3, rtol=0)


def test_stop_strings_and_end_tokens_do_not_show(int8: LanguageModel) -> None:
    full = forerun.generate(int8, PROMPTS[4], max_tokens=60, draft="off")
    stop = full.text[20:26]
    for draft in ("off", "lookup"):
        cut = forerun.generate(int8, PROMPTS[4], max_tokens=60, draft=draft, stop=[stop])
        assert cut.text == full.text[: full.text.index(stop)] and cut.finish_reason == "stop"
    short = forerun.generate(int8, PROMPTS[0], max_tokens=60)
    assert short.finish_reason == "stop" and "<|im_end|>" not in short.text
    assert not set(short.tokens) & int8.stop_ids


def test_the_docstrings_tell_the_truth(int8: LanguageModel) -> None:
    import doctest

    results = doctest.testmod(forerun, extraglobs={"model": int8, "forerun": forerun})
    assert results.attempted >= 5 and results.failed == 0


def test_threads_that_have_answered_keep_no_workers(int8: LanguageModel) -> None:
    """Those of a thread that does nothing any more would make everybody else's rounds take twice as long."""
    tasks = Path("/proc/self/task")
    if not tasks.exists() or torch.get_num_threads() == 1:
        pytest.skip("one thread computes, or the system does not list them")

    def workers() -> int:
        return len({int(task.name) for task in tasks.iterdir()} - {each.native_id for each in threading.enumerate()})

    def ask() -> None:
        answers.append(forerun.generate(int8, "Name a river.", max_tokens=4, draft="off").tokens)
        done.set()
        end.wait()

    answers = [forerun.generate(int8, "Name a river.", max_tokens=4, draft="off").tokens]
    time.sleep(0.1)  # until ours are gone
    before, done, end = workers(), threading.Event(), threading.Event()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    done.wait()
    last = time.monotonic() + 5
    while workers() > before and time.monotonic() < last:
        time.sleep(0.01)
    assert workers() == before and answers[0] == answers[1]
    end.set()
    thread.join()
