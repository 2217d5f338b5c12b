"""What drafting brings on ten kinds of work: the suite of `forerun bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import forerun
from forerun.bench.peers import PEERS
from forerun.bench.runner import Cell, WorkloadRunner, arms_of
from forerun.bench.workloads import Workload, load_workloads
from forerun.errors import ForerunError
from forerun.inspection import exactness_cost
from forerun.language_model import LanguageModel
from forerun.progress import Progress
from forerun.text.chat import encode_prompt

PAIRS = 5  # prompts of each workload, and so pairs with plain decoding, unless all are asked for


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All cells, and what exactness costs a plain step here (None: not known on this device)."""

    cells: list[Cell]
    price: float | None


def run_bench(
    model: str,
    *,
    workloads: Sequence[str],
    temperatures: Sequence[float],
    full: bool,
    peers: Sequence[str],
    loading: Mapping[str, Any],
    progress: Progress,
) -> BenchReport:
    """Load the model and measure; `loading` are the options of `forerun.load`."""
    chosen = load_workloads(workloads)
    if not full:
        chosen = [workload.sample(PAIRS) for workload in chosen]
    # Arms take turns at the same prompts: each reads them as if none had before.
    loaded = forerun.load(model, progress=progress, **{**loading, "prefix_cache": False})
    for workload in chosen:
        check_prompts(loaded, workload)
    others = [PEERS[name](model, loaded) for name in peers]
    price = lowest_price(loaded)
    runner = WorkloadRunner(loaded, arms_of(loaded), others, price or 1.0, progress)
    return BenchReport(runner.measure(chosen, temperatures), price)


def check_prompts(model: LanguageModel, workload: Workload) -> None:
    """What the model cannot be asked is found out before a quarter of an hour of measuring, not in the middle."""
    try:
        longest = max(len(encode_prompt(model.tokenizer, prompt.content)) for prompt in workload.prompts)
    except ForerunError as error:
        raise ForerunError(f"workload {workload.name}: {error}; choose others with -w") from error
    if longest >= (context := model.engine.context):
        raise ForerunError(
            f"workload {workload.name} has a prompt of {longest} tokens, and the context holds {context}: "
            "choose others with -w"
        )


def lowest_price(model: LanguageModel) -> float | None:
    """Of several measurements of what exactness costs, the lowest: a busy moment looks like a price."""
    with torch.inference_mode():
        prices = [exactness_cost(model.engine.model) for _ in range(3)]
    known = [price for price in prices if price is not None]
    return min(known) if known else None
