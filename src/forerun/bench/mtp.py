"""`make bench-mtp`: what the built-in model's MTP head gets accepted, and what that is worth, on prompts it never saw.

Acceptance by position and category, greedy and sampled; then plain decoding against each depth and `auto`, interleaved.
The last line is JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import forerun
from forerun.language_model import LanguageModel
from forerun.response import Response

DEPTH = 4
LENGTH = 128
ARMS: dict[str, dict[str, Any]] = {f"mtp, depth {n}": {"draft": "mtp", "draft_tokens": n} for n in range(1, 6)}
ARMS["lookup"] = {"draft": "lookup"}
ARMS["auto"] = {"draft": "auto"}
TIMED_LENGTH = 64


def eval_prompts() -> list[dict[str, str]]:
    """The held-out prompts, each with its category."""
    text = files("forerun").joinpath("data/eval_prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def looping(tokens: list[int], times: int = 4) -> bool:
    """Does the answer end in the same run of tokens over and over? Any drafter guesses such text."""
    for period in range(1, len(tokens) // times + 1):
        tail = tokens[-period * times :]
        if tail == tail[:period] * times:
            return True
    return False


@dataclass
class Tally:
    """Rounds of several answers added up."""

    rounds: int = 0
    tokens: int = 0
    answers: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)
    drafted: list[int] = field(default_factory=lambda: [0] * DEPTH)

    def add(self, response: Response) -> None:
        self.answers += 1
        self.rounds += response.rounds
        self.tokens += response.rounds + response.accepted
        for position, (drafted, accepted) in enumerate(response.per_position):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    def row(self) -> dict[str, Any]:
        share = [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]
        return {
            "answers": self.answers,
            "tokens_per_round": self.tokens / self.rounds if self.rounds else 0.0,
            "accepted_prefix": share,
        }


def acceptance(model: LanguageModel, prompts: list[dict[str, str]], temperature: float) -> dict[str, Any]:
    """Share of drafts accepted at each position (all before it accepted too), by category; loops apart."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for number, item in enumerate(prompts):
        sampling: dict[str, Any] = {"max_tokens": LENGTH, "temperature": temperature, "seed": number}
        answer = forerun.generate(model, item["prompt"], draft="mtp", draft_tokens=DEPTH, **sampling)
        loop = looping(answer.tokens)
        tallies["all"].add(answer)
        tallies["loops" if loop else "all but loops"].add(answer)
        if not loop:
            tallies[item["category"]].add(answer)
    return {name: tally.row() for name, tally in tallies.items()}


def speed(model: LanguageModel, prompts: list[dict[str, str]]) -> dict[str, Any]:
    """Seconds per token of every arm over plain decoding, interleaved prompt by prompt; the texts must be equal."""
    ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
    seconds: dict[str, float] = defaultdict(float)
    tokens = 0
    for item in prompts:
        plain = forerun.generate(model, item["prompt"], draft="off", max_tokens=TIMED_LENGTH)
        tokens += plain.completion_tokens
        seconds["plain"] += plain.seconds["decode"]
        for arm, settings in ARMS.items():
            other = forerun.generate(model, item["prompt"], max_tokens=TIMED_LENGTH, **settings)
            if other.tokens != plain.tokens:
                raise SystemExit(f"the text changed with {arm}: {item['prompt']!r}")
            seconds[arm] += other.seconds["decode"]
            if other.seconds["decode"]:
                ratios[arm].append(plain.seconds["decode"] / other.seconds["decode"])
    rows: dict[str, Any] = {
        arm: {
            "ratio": seconds["plain"] / seconds[arm],
            "median": statistics.median(ratios[arm]),
            "geometric_mean": math.exp(statistics.fmean(map(math.log, ratios[arm]))),
        }
        for arm in ARMS
    }
    return rows | {"plain_tokens_per_second": tokens / seconds["plain"]}


def main() -> None:
    """Print the tables, then the line of JSON."""
    prompts = eval_prompts()
    if len(sys.argv) > 1:
        prompts = prompts[:: max(1, len(prompts) // int(sys.argv[1]))]
    model = forerun.load("smollm2")
    figures: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        table = acceptance(model, prompts, temperature)
        figures[f"temperature {temperature}"] = table
        print(f"temperature {temperature}, depth {DEPTH}: share of drafts accepted at each position, tokens per round")
        for name, row in table.items():
            shares = "  ".join(f"{share:.3f}" for share in row["accepted_prefix"])
            print(f"  {name:24} {row['answers']:4d} answers   {shares}   {row['tokens_per_round']:.2f}")
    figures["speed"] = speed(model, prompts[::3])
    for arm in ARMS:
        row = figures["speed"][arm]
        print(f"{arm:14} {row['ratio']:.2f}× plain decoding in all, median {row['median']:.2f}×")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
