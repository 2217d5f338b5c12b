"""What drafting is worth on a GPU by batch size and depth: the built-in model with its head, real prompts, greedy.

`python -m forerun.bench.gpu_batches` prints a table and last a line of JSON. All lanes are busy while time is taken:
from the first round of a batch to the end of its first answer. Plain decoding and every depth take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.resources import files

import torch

from forerun.engine.engine import Engine, Silence
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence, Status
from forerun.loading import load_model
from forerun.sample.parameters import SamplingParams
from forerun.text.chat import encode_prompt

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
            engine.pause(sequence)  # whoever has read its prompt: the first would be done before the last begins
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="the built-in model, or where its file is")
    parser.add_argument("--batch", type=int, choices=BATCHES, help="only this one")
    wish = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this measures an NVIDIA GPU, and torch sees none\n")
    model = load_model(wish.model, device="cuda", max_context=8192)  # the cache holds eight such
    lines = files("forerun").joinpath("data", "eval_prompts.jsonl").read_text().splitlines()
    prompts = [tuple(encode_prompt(model.tokenizer, json.loads(line)["prompt"], None, False)) for line in lines]
    table: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        for batch, sets in BATCHES.items():
            if wish.batch not in (None, batch):
                continue
            rates: dict[int, list[float]] = {depth: [] for depth in (0, *DEPTHS)}
            for number in range(-1, sets):  # the first is thrown away: it captures graphs
                mine = [prompts[(max(number, 0) * batch + n * 5) % len(prompts)] for n in range(batch)]
                rate, plain = run(model.engine, mine, 0)
                rates[0].append(rate)
                for depth in DEPTHS:
                    rate, answers = run(model.engine, mine, depth)
                    assert agree(answers, plain), f"batch {batch}, depth {depth}: other tokens than plain decoding"
                    rates[depth].append(rate)
            ratios = {
                depth: statistics.median(a / b for a, b in zip(rates[depth][1:], rates[0][1:], strict=True))
                for depth in DEPTHS
            }
            best = max(ratios, key=lambda depth: ratios[depth])
            plain_rate = statistics.median(rates[0][1:])
            table[batch] = {"plain_tokens_per_second": plain_rate, "best_depth": best, "best": ratios[best]}
            table[batch] |= {f"depth_{depth}": ratio for depth, ratio in ratios.items()}
            shown = "  ".join(f"{depth}: {ratio:.2f}x" for depth, ratio in ratios.items())
            print(f"batch {batch:2}  plain {plain_rate:8.0f} tok/s   depth {shown}", flush=True)
    print(json.dumps(table))


if __name__ == "__main__":
    main()
