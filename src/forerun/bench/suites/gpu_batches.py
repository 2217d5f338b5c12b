"""What drafting is worth on a GPU by batch size and depth: the built-in model with its head, real prompts, greedy.

All batch slots are busy while time is taken: from the first round of a batch to the end of its first answer. Plain
decoding and every depth take turns.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from forerun.bench.statistics import Turns
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.engine.warmup import Silence
from forerun.loading import load_model
from forerun.sample.parameters import SamplingParams
from forerun.text.chat import encode_prompt
from forerun.train.prompts.questions import EVERYDAY, read_evaluation

BATCHES = {1: 16, 2: 8, 4: 5, 8: 4, 16: 3, 32: 3, 64: 3}  # sets of prompts for each
DEPTHS = (1, 2, 3, 4, 5, 6)
TOKENS = 128


def run(engine: Engine, prompts: list[tuple[int, ...]], depth: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of a full batch, and the answers as far as they came. End tokens do not end them."""
    draft = "mtp" if depth else "off"
    sequences = [
        engine.submit(Request(prompt, SamplingParams(), TOKENS, draft=draft, draft_tokens=depth or None), Silence())  # type: ignore[arg-type]
        for prompt in prompts
    ]
    while any(sequence.status is not Status.PAUSED for sequence in sequences):
        engine.step()
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                engine.pause(
                    sequence
                )  # until all have read their prompts: the first would be done before the last begins
    for sequence in sequences:
        engine.unpause(sequence)
    engine.step()
    torch.cuda.synchronize()
    before, began = emitted(sequences), time.perf_counter()
    while all(sequence.status is Status.RUNNING for sequence in sequences):
        engine.step()
    rate = (emitted(sequences) - before) / (time.perf_counter() - began)
    answers = [sequence.answer for sequence in sequences]
    for sequence in sequences:
        engine.release(sequence)
    return rate, answers


def emitted(sequences: list[Sequence]) -> int:
    return sum(len(sequence.answer) for sequence in sequences)


def agree(answers: list[list[int]], others: list[list[int]]) -> bool:
    """Is one the beginning of the other, for every prompt?"""
    pairs = zip(answers, others, strict=True)
    return all(a[: min(len(a), len(b))] == b[: min(len(a), len(b))] for a, b in pairs)


def measure_batch(engine: Engine, prompts: list[tuple[int, ...]], batch: int, sets: int) -> dict[str, float]:
    """Every depth beside plain decoding, on several sets of prompts."""
    turns = Turns()
    for number in range(-1, sets):  # the first is thrown away: it captures graphs
        mine = [prompts[(max(number, 0) * batch + n * 5) % len(prompts)] for n in range(batch)]
        rate, plain = run(engine, mine, 0)
        rates = {"plain": rate}
        for depth in DEPTHS:
            rates[f"depth_{depth}"], answers = run(engine, mine, depth)
            assert agree(answers, plain), f"batch {batch}, depth {depth}: other tokens than plain decoding"
        if number >= 0:
            turns.note(**rates)
    ratios = {depth: turns.ratio(f"depth_{depth}", "plain") for depth in DEPTHS}
    best = max(ratios, key=lambda depth: ratios[depth])
    shown = "  ".join(f"{depth}: {ratio:.2f}x" for depth, ratio in ratios.items())
    print(f"batch {batch:2}  plain {turns.median('plain'):8.0f} tok/s   depth {shown}", flush=True)
    figures = {"plain_tokens_per_second": turns.median("plain"), "best_depth": best, "best": ratios[best]}
    return figures | {f"depth_{depth}": ratio for depth, ratio in ratios.items()}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="the built-in model, or where its file is")
    parser.add_argument("--batch", type=int, choices=BATCHES, help="only this one")


def measure(options: Namespace) -> dict[int, Any]:
    """One batch size after the other."""
    model = load_model(options.model, device="cuda", max_context=8192, prefix_cache=False)
    everyday = [question.prompt for question in read_evaluation(None) if question.collection == EVERYDAY]
    prompts = [tuple(encode_prompt(model.tokenizer, prompt)) for prompt in everyday]
    with torch.inference_mode():
        return {
            batch: measure_batch(model.engine, prompts, batch, sets)
            for batch, sets in BATCHES.items()
            if options.batch in (None, batch)
        }
