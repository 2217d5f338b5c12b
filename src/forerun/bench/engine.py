"""`make bench`: plain decoding, lookup and transformers on the same prompts, interleaved, and what choosing costs.

Prints a table and, last, one line of JSON. Ratios are medians over interleaved repeats.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import forerun
from forerun.bench.prompts import EDIT, LONG, PLAIN
from forerun.cache.pages import SequenceCache
from forerun.engine.probe import step
from forerun.inspection import exactness_cost
from forerun.language_model import LanguageModel
from forerun.sample.choose import choose
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams
from forerun.sample.row import Row
from forerun.weights.find import find

REPEATS = 5
TOKENS = 64
PREFILL = 1000


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    """Our engine and transformers (float32) on the same weights."""

    def __init__(self, name: str = "smollm2") -> None:
        from transformers import AutoModelForCausalLM

        self.model: LanguageModel = forerun.load(name)
        self.peer: Any = AutoModelForCausalLM.from_pretrained(find(name), dtype=torch.float32)

    def ours(self, prompt: str, draft: str, tokens: int = TOKENS) -> float:
        """Tokens per second of decoding, the prompt not counted."""
        return forerun.generate(self.model, prompt, max_tokens=tokens, draft=draft).tokens_per_second

    def ids(self, prompt: str) -> Tensor:
        """The prompt as transformers sees it, [1, tokens]."""
        messages = [{"role": "user", "content": prompt}]
        text = self.model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.model.tokenizer(text)["input_ids"]])

    def theirs(self, prompt: str, tokens: int = TOKENS) -> float:
        """The same for transformers: a long run minus a short one leaves decoding alone."""
        ids = self.ids(prompt)
        marks: list[float] = []

        class Clock:
            def put(self, value: Tensor) -> None:  # noqa: ARG002
                marks.append(time.perf_counter())

            def end(self) -> None:
                pass

        options = {"max_new_tokens": tokens, "do_sample": False, "streamer": Clock()}
        self.peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        # The first mark is the prompt, the second the first token; the rest is decoding.
        return (len(marks) - 2) / (marks[-1] - marks[1])

    def long_prompt(self) -> list[int]:
        """Exactly PREFILL tokens."""
        return list(self.model.tokenizer(LONG)["input_ids"])[:PREFILL]

    def our_prefill(self, draft: str = "off") -> float:
        """Seconds to read a long prompt and give the first token; with `mtp` the head reads it too."""
        return forerun.generate(self.model, self.long_prompt(), max_tokens=1, draft=draft).seconds["prefill"]

    def their_prefill(self) -> float:
        """The same forward in transformers, logits of the last position only."""
        ids = torch.tensor([self.long_prompt()])
        return seconds(lambda: self.peer(ids, logits_to_keep=1, use_cache=True))

    def first_token(self) -> float:
        """Seconds from a 30-token prompt to its first token."""
        prompt = self.long_prompt()[:30]
        return seconds(lambda: forerun.generate(self.model, prompt, max_tokens=1))

    def choosing(self) -> tuple[float, float]:
        """Seconds of a pass of width 5, and of choosing its rows at temperature 0.8 with top-p."""
        engine = self.model.engine
        cache = SequenceCache(engine.pool)
        cache.grow(400)
        try:
            tokens = self.long_prompt()
            step(engine.model, [cache], [tokens[:60]])
            before = time.perf_counter()
            logits = step(engine.model, [cache], [tokens[60:65]])
            middle = time.perf_counter()
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
            history = TokenHistory(tokens[:60])
            rows = [Row(params, history, tuple(tokens[60 : 60 + n]), 61 + n) for n in range(5)]
            choose(logits, rows, engine.vocab)
            return middle - before, time.perf_counter() - middle
        finally:
            cache.release()

    def pass_times(self) -> dict[int, float]:
        """Milliseconds of a target pass by width, best of many, widths interleaved."""
        engine, tokens = self.model.engine, self.long_prompt()
        best: dict[int, float] = {}
        cache = SequenceCache(engine.pool)
        cache.grow(400)
        step(engine.model, [cache], [tokens[:100]])
        start = cache.snapshot()
        try:
            for _ in range(15):
                for width in (1, 2, 4, 5, 8, 16):
                    cache.restore(start)
                    took = seconds(partial(step, engine.model, [cache], [tokens[:width]]))
                    best[width] = min(best.get(width, 1e9), 1000 * took)
        finally:
            cache.release()
        return best


def second_start() -> float:
    """Seconds of a whole `forerun generate` with everything cached."""
    program = "from forerun.cli.main import run; run()"
    command = [sys.executable, "-c", program, "generate", "-p", "Hi", "-n", "1", "--quiet"]
    return min(seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3))


def measure() -> dict[str, Any]:
    """All figures, arms interleaved within every repeat."""
    with torch.inference_mode():
        bench = Bench()
        for warm in (bench.our_prefill, bench.their_prefill, lambda: bench.ours(EDIT, "lookup", 16)):
            warm()
        bench.theirs(PLAIN[0], 4)
        plain_ratio, edit_ratio, prefill_ratio, head_ratio = [], [], [], []
        plain_speed, peer_speed, edit_plain, edit_lookup, first, shares = [], [], [], [], [], []
        for _ in range(REPEATS):
            for prompt in PLAIN:
                mine, other = bench.ours(prompt, "off"), bench.theirs(prompt)
                plain_speed.append(mine)
                peer_speed.append(other)
                plain_ratio.append(mine / other)
            off, lookup = bench.ours(EDIT, "off", 140), bench.ours(EDIT, "lookup", 140)
            edit_plain.append(off)
            edit_lookup.append(lookup)
            edit_ratio.append(lookup / off)
            theirs = bench.their_prefill()
            prefill_ratio.append(theirs / bench.our_prefill())
            head_ratio.append(theirs / bench.our_prefill("mtp"))
            first.append(bench.first_token())
            whole, choosing = bench.choosing()
            shares.append(choosing / whole)
        median = statistics.median
        return {
            "plain_vs_transformers": median(plain_ratio),
            "lookup_edit_vs_plain": median(edit_ratio),
            "prefill_vs_transformers": median(prefill_ratio),
            "prefill_with_head_vs_transformers": median(head_ratio),
            "first_token_seconds": median(first),
            "choose_share": median(shares),
            "second_start_seconds": second_start(),
            "exactness_cost": exactness_cost(bench.model.engine.model),
            "tokens_per_second": {
                "plain": median(plain_speed),
                "transformers": median(peer_speed),
                "plain, edit": median(edit_plain),
                "lookup, edit": median(edit_lookup),
            },
            "pass_milliseconds": bench.pass_times(),
            "guaranteed": bench.model.probe.guaranteed,
        }


GOALS = {
    "plain_vs_transformers": "≥ 2",
    "lookup_edit_vs_plain": "≥ 1.6",
    "prefill_vs_transformers": "≥ 1",
    "prefill_with_head_vs_transformers": "",
    "first_token_seconds": "",
    "choose_share": "≤ 0.15",
    "second_start_seconds": "< 6",
    "exactness_cost": "",
}


def main() -> None:
    """Print the table, then the line of JSON."""
    figures = measure()
    for name, goal in GOALS.items():
        print(f"{name:34} {figures[name]:8.3f}   {goal}")
    for name, speed in figures["tokens_per_second"].items():
        print(f"{'tokens/s, ' + name:26} {speed:8.1f}")
    for width, took in figures["pass_milliseconds"].items():
        print(f"{f'pass of width {width}':26} {took:8.2f} ms")
    print(json.dumps(figures))
