"""What the built-in model's MTP head gets accepted, and what that is worth, on prompts it never saw.

Acceptance by position and category, greedy and sampled; then each depth and `auto` beside plain decoding, interleaved.
"""

from __future__ import annotations

import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import forerun
from forerun.bench.runner import PLAIN, Cell, MeasuredRun, WorkloadRunner
from forerun.bench.workloads import Workload, WorkloadPrompt
from forerun.language_model import LanguageModel
from forerun.progress import NullProgress
from forerun.train.prompts.questions import Question, read_evaluation

DEPTH = 4
LENGTH = 128
ARMS: dict[str, dict[str, Any]] = {f"mtp, depth {n}": {"draft": "mtp", "draft_tokens": n} for n in range(1, 6)}
ARMS |= {"lookup": {"draft": "lookup"}, "auto": {"draft": "auto"}}
TIMED_LENGTH = 64


def looping(tokens: list[int], times: int = 4) -> bool:
    """Does the answer end in the same run of tokens over and over? Any drafter guesses such text."""
    for period in range(1, len(tokens) // times + 1):
        tail = tokens[-period * times :]
        if tail == tail[:period] * times:
            return True
    return False


def acceptance(model: LanguageModel, questions: Sequence[Question], temperature: float) -> dict[str, Any]:
    """Share of drafts accepted at each position (all before it accepted too), by length and category; loops apart."""
    cells: dict[str, Cell] = {}
    lengths = {question.long for question in questions}
    for number, question in enumerate(questions):
        sampling: dict[str, Any] = {"max_tokens": LENGTH, "temperature": temperature, "seed": number}
        answer = forerun.generate(model, question.prompt, draft="mtp", draft_tokens=DEPTH, **sampling)
        names = ["all", "all long" if question.long else "all short"] if len(lengths) == 2 else ["all"]
        names += ["loops"] if looping(answer.tokens) else ["all but loops", question.category]
        for name in names:
            cell = cells.setdefault(name, Cell(name, "mtp", temperature))
            cell.runs.append(MeasuredRun.of(answer, answer.seconds["decode"], answer.seconds["decode"]))
    return {
        name: {
            "answers": cell.total,
            "tokens_per_round": cell.tokens_per_round or 0.0,
            "accepted_prefix": cell.accepted_per_position,
        }
        for name, cell in cells.items()
    }


def speed(model: LanguageModel, questions: Sequence[Question]) -> dict[str, Any]:
    """Plain decoding's seconds over every arm's, interleaved prompt by prompt; the texts must be equal."""
    prompts = tuple(WorkloadPrompt(str(number), question.prompt) for number, question in enumerate(questions))
    work = Workload("held out", TIMED_LENGTH, prompts)
    cells = {cell.arm: cell for cell in WorkloadRunner(model, ARMS, [], 1.0, NullProgress()).measure([work], [0.0])}
    for arm, cell in cells.items():
        if not cell.same:
            raise SystemExit(f"the text changed with {arm}: {cell.equal} of {cell.total} texts are equal")
    plain = cells.pop(PLAIN)
    rows: dict[str, Any] = {
        arm: {
            "ratio": statistics.fmean(cell.ratios, [run.seconds for run in cell.runs if len(run.tokens) > 1]),
            "median": statistics.median(cell.ratios),
            "geometric_mean": math.exp(statistics.fmean(map(math.log, cell.ratios))),
        }
        for arm, cell in cells.items()
    }
    return rows | {"plain_tokens_per_second": plain.tokens_per_second}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("sample", nargs="?", type=int, help="so many prompts of each collection; default: all of them")
    parser.add_argument("--head", help="another head's folder instead of the built-in one")


def measure(options: Namespace) -> dict[str, Any]:
    """The tables of acceptance, then the speed of every arm."""
    collections: dict[str, list[Question]] = {}
    for question in read_evaluation(None):
        collections.setdefault(question.collection, []).append(question)
    if options.sample:
        collections = {name: some[:: max(1, len(some) // options.sample)] for name, some in collections.items()}
    model = forerun.load("smollm2", head=options.head or "auto", prefix_cache=False)
    figures: dict[str, Any] = {}
    for collection, questions in collections.items():
        for temperature in (0.0, 0.8):
            name = f"{collection}, temperature {temperature}"
            table = figures[name] = acceptance(model, questions, temperature)
            print(f"{name}, depth {DEPTH}: share of drafts accepted at each position, tokens per round")
            for group, row in table.items():
                shares = "  ".join(f"{share:.3f}" for share in row["accepted_prefix"])
                print(f"  {group:24} {row['answers']:4d} answers   {shares}   {row['tokens_per_round']:.2f}")
        rows = figures[f"{collection}, speed"] = speed(model, questions[::3])
        for arm in ARMS:
            told = f"{rows[arm]['ratio']:.2f}× in all, geometric mean {rows[arm]['geometric_mean']:.2f}×"
            print(f"{collection}, {arm:14} {told} plain decoding, median {rows[arm]['median']:.2f}×")
    return figures
