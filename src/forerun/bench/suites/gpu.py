"""How near to the memory limit rounds are on a GPU, and how long prompts take there.

Random weights in the shapes of two real models, and the built-in model.
Device times are those of captured graphs replayed one after another, medians; wall times are the engine's.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from forerun.bench.gpu_prompts import Cells, between_tokens, many_prompts, single_prompts
from forerun.bench.gpu_subjects import Scale, Subject, TooLong, built_in, random_subject
from forerun.bench.peers import folder_of
from forerun.bench.random_model import ASSISTANTS, SHAPES
from forerun.bench.step_weights import chosen_experts, pass_bytes, step_matrices
from forerun.bench.timing import captured, device_seconds, wall_seconds
from forerun.cache.pages import SequenceCache
from forerun.device import plan_machine
from forerun.engine.probe import step
from forerun.kernels.matrix import FloatMatrix
from forerun.models.layers.rows import Output, make_pass
from forerun.sample.parameters import SamplingParams

PROMPT = 100  # tokens before what transformers is timed with
DEPTH = 4  # of the rounds with drafts
MINUTES = 8.0  # for one model, without transformers
SUBJECTS = ("Qwen3.5-4B", "Llama-8B", "smollm2")
PEERS = {"none": [], "eager": ["eager"], "best": ["eager", "best"]}
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)


def floor(subject: Subject) -> Cells:
    """All linear layers of one row by cuBLAS, in one graph: those that a plain step has to read."""
    decoder = subject.engine.model
    matrices = step_matrices(decoder)
    inputs = {
        matrix.shape[1]: torch.randn(1, matrix.shape[1], device=decoder.device, dtype=decoder.dtype)
        for matrix in matrices
    }

    def launch() -> list[Tensor]:
        return [F.linear(inputs[m.shape[1]], m.weight) for m in matrices if isinstance(m, FloatMatrix)]

    yield "floor_ms", 1e3 * device_seconds(captured(launch))


def rounds_of(subject: Subject, **options: Any) -> tuple[float, float, float]:
    """Seconds: of a round in the engine; of the graphs of its drafts, and of all its graphs, without the host."""
    answer = subject.running(subject.scale.short, **options)
    walls = []
    for _ in range(subject.scale.repeats):
        began, first = time.perf_counter(), answer.counters.rounds
        last = first + subject.scale.steps
        subject.until(lambda last=last: answer.counters.rounds >= last)  # type: ignore[misc]
        walls.append((time.perf_counter() - began) / (answer.counters.rounds - first))
    drafts, passes = subject.replays()
    drafting = 0.0 if drafts is None or not answer.counters.drafted else device_seconds(drafts)
    device = drafting + device_seconds(passes)
    subject.stop()
    return statistics.median(walls), drafting, device


def plain(subject: Subject) -> Cells:
    """Rounds of one sequence, greedy and filtered."""
    wall, _, device = rounds_of(subject)
    yield "plain_ms", 1e3 * device
    yield "plain_wall_ms", 1e3 * wall
    yield "host_share", max(0.0, 1 - device / wall)
    filtered = rounds_of(subject, sampling=FILTERED)[0]
    yield "filtered_wall_ms", 1e3 * filtered
    yield "filtered_over_plain", filtered / wall


def with_pass(subject: Subject, width: int) -> tuple[Callable[[], Output], SequenceCache]:
    """Runs a target pass of one sequence in the middle of its answer; and what holds its pages."""
    engine, tokens = subject.engine, [(31 * n + 5) % subject.engine.vocab for n in range(subject.scale.short)]
    cache = SequenceCache(engine.pool)
    cache.grow(len(tokens) + 1 + width)
    step(engine.model, [cache], [tokens])
    step(engine.model, [cache], [tokens[:1]])
    batch = make_pass([(cache, tokens[:width])])
    return (lambda: engine.model.forward(batch)), cache


def widths(subject: Subject) -> Cells:
    """A pass of eight rows beside one of one row. Eight rows of a mixture of experts read more weights."""
    found = []
    for width in (1, 8):
        launch, cache = with_pass(subject, width)
        weights = pass_bytes(subject.engine.model, chosen_experts(subject.engine.model, launch))
        found.append((device_seconds(captured(launch)), weights))
        cache.release()
        yield f"pass_{width}_ms", 1e3 * found[-1][0]
        yield f"weights_{width}_gb", weights / 1e9
    (narrow, few), (wide, many) = found
    yield "width_8_over_1", wide / narrow
    yield "weights_8_over_1", many / few


def drafts(subject: Subject) -> Cells:
    """Rounds that draft: with a head, or with an assistant."""
    if subject.drafter is None:
        return
    name = subject.drafter
    wall, drafting, device = rounds_of(subject, draft=name, draft_tokens=DEPTH)
    yield "draft_step_ms", 1e3 * drafting / DEPTH
    yield f"{name}_{DEPTH}_ms", 1e3 * device
    yield f"{name}_{DEPTH}_wall_ms", 1e3 * wall
    yield f"{name}_{DEPTH}_host_share", max(0.0, 1 - device / wall)


PARTS: dict[str, Callable[[Subject], Cells]] = {
    "floor": floor,
    "plain": plain,
    "widths": widths,
    "drafts": drafts,
    "prompts": single_prompts,
    "crowds": many_prompts,
    "between": between_tokens,
}
RATIOS = {"plain_over_floor": ("plain_ms", "floor_ms"), "draft_step_over_plain": ("draft_step_ms", "plain_ms")}


def measure_subject(subject: Subject, parts: list[str], seconds: float) -> dict[str, float]:
    """All cells of one model, shown as they come. A part that fails or has no time left is named and left out."""
    cells: dict[str, float] = {}
    subject.deadline = time.perf_counter() + seconds
    for part in parts:
        try:
            for cell, value in PARTS[part](subject):
                cells[cell] = value
                show(subject.name, {cell: value})
        except TooLong as error:
            print(f"{subject.name}: {part} is left out: {error} ({seconds / 60:.1f} minutes a model)", flush=True)
        except Exception:  # noqa: BLE001 - the other parts may still tell something
            traceback.print_exc()
            print(f"{subject.name}: {part} failed", flush=True)
        subject.stop()
    found = {name: cells[of] / cells[by] for name, (of, by) in RATIOS.items() if of in cells and by in cells}
    show(subject.name, found)
    return cells | found


def print_kernels(subject: Subject) -> None:
    """Where the time of a narrow and of a wide pass goes, kernel by kernel."""
    for width in (1, 8):
        launch, cache = with_pass(subject, width)
        replay = captured(launch)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            replay()
            torch.cuda.synchronize()
        cache.release()
        print(f"a pass of width {width}:", flush=True)
        print(found.key_averages().table(sort_by="self_device_time_total", row_limit=32), flush=True)


def transformers_seconds(config: dict[str, Any] | None, folder: str | None, best: bool) -> float:
    """Seconds per token of transformers, greedy, one sequence: eager, or with its static cache and compilation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")
    else:
        assert config is not None
        settings = {name: value for name, value in config.items() if name != "model_type"}
        kind = AutoConfig.for_model(config["model_type"], **settings)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    model.eval()
    prompt = torch.arange(5, 5 + PROMPT, device="cuda")[None]
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if best:
        options["cache_implementation"] = "static"

    def run(tokens: int) -> float:
        return wall_seconds(partial(model.generate, prompt, max_new_tokens=tokens, min_new_tokens=tokens, **options))

    run(8)
    if best:
        run(40)
    return statistics.median((run(40) - run(8)) / 32 for _ in range(3))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=(*SUBJECTS, *ASSISTANTS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for one model, without transformers")
    parser.add_argument("--model", default="smollm2", help="the built-in model, or where its file is")
    parser.add_argument("--peer", choices=PEERS, default="eager", help="transformers beside it")
    parser.add_argument("--profile", action="store_true", help="kernels of a pass by kind: where its time goes")


def measure(options: Namespace) -> dict[str, Any]:
    """All models, each beside transformers."""
    torch.manual_seed(0)
    table: dict[str, dict[str, float]] = {}
    machine = plan_machine("cuda", "bfloat16", "none")
    with torch.inference_mode():
        for name in SUBJECTS if options.only is None else (options.only,):
            if name == "smollm2":
                subject = built_in(options.model, Scale())
            else:
                subject = random_subject(name, SHAPES[name], ASSISTANTS.get(name), machine, Scale())
            table[name] = cells = measure_subject(subject, options.parts, 60 * options.minutes)
            if options.profile:
                print_kernels(subject)
            del subject
            gc.collect()  # an engine and its graphs hold each other
            torch.cuda.empty_cache()
            for peer in PEERS[options.peer]:
                cells |= beside(name, peer, options.model, cells.get("plain_wall_ms"))
    return table


def beside(name: str, peer: str, model: str, plain_ms: float | None) -> dict[str, float]:
    """What transformers takes for the same, or nothing where it does not run."""
    try:
        with folder_of(model) if name == "smollm2" else nullcontext() as folder:
            given = None if folder is None else str(folder)
            milliseconds = 1e3 * transformers_seconds(SHAPES.get(name), given, peer == "best")
    except Exception as error:  # noqa: BLE001 - whatever a peer dies of is a result, and no reason to stop
        print(f"{name}: transformers ({peer}) does not run here: {str(error).splitlines()[0]}", flush=True)
        return {}
    found = {f"transformers_{peer}_ms": milliseconds}
    if plain_ms is not None:
        found[f"versus_transformers_{peer}"] = milliseconds / plain_ms
    show(name, found)
    torch.cuda.empty_cache()
    return found


def show(name: str, cells: dict[str, float]) -> None:
    """As they come: a peer may take minutes."""
    for cell, value in cells.items():
        print(f"{name:12} {cell:28} {value:9.4f}", flush=True)
