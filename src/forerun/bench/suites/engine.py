"""Plain decoding, lookup and transformers on the same prompts, interleaved, and what choosing costs.

Ratios are medians over interleaved repeats.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from argparse import ArgumentParser, Namespace
from functools import partial
from importlib.resources import files
from typing import Any

import torch

import forerun
from forerun.bench.child_server import PROGRAM
from forerun.bench.peers import TransformersPeer
from forerun.bench.statistics import Turns
from forerun.bench.timing import wall_seconds
from forerun.cache.pages import SequenceCache
from forerun.engine.probe import step
from forerun.inspection import exactness_cost
from forerun.language_model import LanguageModel
from forerun.sample.choose import choose
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams
from forerun.sample.row import Row
from forerun.text.chat import encode_prompt

REPEATS = 5
TOKENS = 64
EDIT_TOKENS = 140
PREFILL = 1000
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


class Bench:
    """Our engine and transformers (float32) on the same weights."""

    def __init__(self, name: str = "smollm2") -> None:
        self.model: LanguageModel = forerun.load(name, prefix_cache=False)
        self.peer = TransformersPeer(name, self.model)
        texts = tomllib.loads(files("forerun").joinpath("data/workloads/engine.toml").read_text(encoding="utf-8"))
        passage = texts["passage"]
        self.plain: list[str] = texts["plain"]
        self.edit: str = texts["edit"].replace("{passage}", passage)
        self.long: list[int] = list(self.model.tokenizer(" ".join([passage] * 12))["input_ids"])[:PREFILL]

    def ours(self, prompt: str, draft: str, tokens: int = TOKENS) -> float:
        """Tokens per second of decoding, the prompt not counted."""
        return forerun.generate(self.model, prompt, max_tokens=tokens, draft=draft).tokens_per_second

    def theirs(self, prompt: str, tokens: int = TOKENS) -> float:
        """The same for transformers."""
        answer = self.peer.answer(encode_prompt(self.model.tokenizer, prompt), 0.0, tokens, 0)
        return answer.decoded / answer.seconds

    def our_prefill(self, draft: str = "off") -> float:
        """Seconds to read a long prompt and give the first token; with `mtp` the head reads it too."""
        return forerun.generate(self.model, self.long, max_tokens=1, draft=draft).seconds["prefill"]

    def their_prefill(self) -> float:
        """The same forward in transformers, logits of the last position only."""
        ids = torch.tensor([self.long])
        return wall_seconds(lambda: self.peer.model(ids, logits_to_keep=1, use_cache=True))

    def first_token(self) -> float:
        """Seconds from a 30-token prompt to its first token."""
        return wall_seconds(lambda: forerun.generate(self.model, self.long[:30], max_tokens=1))

    def choosing(self) -> float:
        """What choosing the rows of a pass of width 5 takes over the pass, at temperature 0.8 with top-p."""
        engine, tokens = self.model.engine, self.long
        cache = SequenceCache(engine.pool)
        cache.grow(400)
        try:
            step(engine.model, [cache], [tokens[:60]])
            before = time.perf_counter()
            logits = step(engine.model, [cache], [tokens[60:65]])
            middle = time.perf_counter()
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
            history = TokenHistory(tokens[:60])
            rows = [Row(params, history, tuple(tokens[60 : 60 + n]), 61 + n) for n in range(5)]
            choose(logits, rows, engine.vocab)
            return (time.perf_counter() - middle) / (middle - before)
        finally:
            cache.release()

    def pass_times(self) -> dict[int, float]:
        """Milliseconds of a target pass by width, best of many, widths interleaved."""
        engine, tokens = self.model.engine, self.long
        best: dict[int, float] = {}
        cache = SequenceCache(engine.pool)
        cache.grow(400)
        step(engine.model, [cache], [tokens[:100]])
        start = cache.snapshot()
        try:
            for _ in range(15):
                for width in (1, 2, 4, 5, 8, 16):
                    cache.restore(start)
                    took = wall_seconds(partial(step, engine.model, [cache], [tokens[:width]]))
                    best[width] = min(best.get(width, 1e9), 1000 * took)
        finally:
            cache.release()
        return best

    def warm_up(self) -> None:
        """Each once, unmeasured."""
        self.our_prefill()
        self.their_prefill()
        self.ours(self.edit, "lookup", 16)
        self.theirs(self.plain[0], 4)

    def turns(self) -> Turns:
        """All of them, one after the other, again and again."""
        turns = Turns()
        for _ in range(REPEATS):
            for prompt in self.plain:
                turns.note(plain=self.ours(prompt, "off"), transformers=self.theirs(prompt))
            turns.note(edit=self.ours(self.edit, "off", EDIT_TOKENS))
            turns.note(edit_lookup=self.ours(self.edit, "lookup", EDIT_TOKENS))
            turns.note(their_prefill=self.their_prefill(), prefill=self.our_prefill())
            turns.note(prefill_with_head=self.our_prefill("mtp"), first=self.first_token(), choose=self.choosing())
        return turns


def second_start() -> float:
    """Seconds of a whole `forerun generate` with everything cached."""
    command = [sys.executable, "-c", PROGRAM, "generate", "-p", "Hi", "-n", "1", "--quiet"]
    return min(wall_seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3))


def add_options(parser: ArgumentParser) -> None:
    """None: the figures are those of the built-in model."""


def measure(options: Namespace) -> dict[str, Any]:  # noqa: ARG001
    """All figures, arms interleaved within every repeat, as a table."""
    with torch.inference_mode():
        bench = Bench()
        bench.warm_up()
        turns = bench.turns()
        figures: dict[str, Any] = {
            "plain_vs_transformers": turns.ratio("plain", "transformers"),
            "lookup_edit_vs_plain": turns.ratio("edit_lookup", "edit"),
            "prefill_vs_transformers": turns.ratio("their_prefill", "prefill"),
            "prefill_with_head_vs_transformers": turns.ratio("their_prefill", "prefill_with_head"),
            "first_token_seconds": turns.median("first"),
            "choose_share": turns.median("choose"),
            "second_start_seconds": second_start(),
            "exactness_cost": exactness_cost(bench.model.engine.model),
            "tokens_per_second": {
                "plain": turns.median("plain"),
                "transformers": turns.median("transformers"),
                "plain, edit": turns.median("edit"),
                "lookup, edit": turns.median("edit_lookup"),
            },
            "pass_milliseconds": bench.pass_times(),
            "guaranteed": bench.model.probe.guaranteed,
        }
    for name, goal in GOALS.items():
        print(f"{name:34} {figures[name]:8.3f}   {goal}")
    for name, speed in figures["tokens_per_second"].items():
        print(f"{'tokens/s, ' + name:26} {speed:8.1f}")
    for width, took in figures["pass_milliseconds"].items():
        print(f"{f'pass of width {width}':26} {took:8.2f} ms")
    return figures
