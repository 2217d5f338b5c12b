"""How near to the memory limit rounds are on a GPU.

Random weights in the shapes of two real models, and the built-in model.
Device times are those of captured graphs replayed one after another, medians; wall times are the engine's.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from forerun.bench.peers import folder_of
from forerun.bench.random_model import ASSISTANTS, SHAPES, RandomCheckpoint
from forerun.bench.step_weights import chosen_experts, pass_bytes, step_matrices
from forerun.bench.timing import captured, device_seconds, wall_seconds
from forerun.cache.pages import PagePool
from forerun.device import plan_machine
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.mtp_device import MtpDeviceHalf
from forerun.draft.protocol import Drafter
from forerun.engine.device import DeviceExecutor, device_executor
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.round_graphs import Shape
from forerun.engine.warmup import Silence
from forerun.kernels.gpu.choosing import choose_tokens
from forerun.kernels.interface import PassRows
from forerun.kernels.matrix import FloatMatrix
from forerun.loading import attach_head, graphed, load_model
from forerun.models.families import build
from forerun.models.gemma4_assistant import build_assistant, read_assistant
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import Output, Pass
from forerun.policy.costs import CostTable
from forerun.progress import NullProgress
from forerun.sample.parameters import SamplingParams

CONTEXT = 2048
DRAFT_VOCABULARY = 32768
PROMPT = 100
STEPS = 40  # rounds that are timed together
SUBJECTS = ("Qwen3.5-4B", "Llama-8B", "smollm2")
PEERS = {"none": [], "eager": ["eager"], "best": ["eager", "best"]}
GREEDY = SamplingParams()
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)


@dataclass
class Subject:
    """A model to measure."""

    name: str
    engine: Engine
    head: MtpHead | None
    assisted: bool = False


def random_subject(name: str) -> Subject:
    """A model of a real shape; its head drafts from a reduced vocabulary."""
    machine = plan_machine("cuda", "bfloat16", "none")
    checkpoint = RandomCheckpoint(SHAPES[name], machine.device)
    decoder = build(checkpoint, machine.kernels, machine.device, machine.dtype, NullProgress())
    pool = PagePool.for_model(decoder.config, 400, 64, machine.dtype, machine.device, slots=16, on_device=True)
    head, drafters, vocab = decoder.native_head(), dict[str, Drafter](), decoder.config.vocab
    if head is not None:
        head.vocabulary = torch.arange(DRAFT_VOCABULARY, device=machine.device)
        head.output = decoder.kernels.matrix(decoder.output_rows(head.vocabulary).to(machine.dtype), None)
        drafters["mtp"] = attach_head(head, decoder, pool, vocab, CONTEXT)
    if name in ASSISTANTS:
        own = RandomCheckpoint(ASSISTANTS[name], machine.device)
        assistant = build_assistant(read_assistant(own.reader), own, decoder, "n-1")
        drafters["assistant"] = AssistantDrafter(assistant, pool, vocab)
    costs = CostTable()
    executor = device_executor(graphed(decoder, pool, CONTEXT), drafters, vocab, costs)
    engine = Engine(decoder, pool, drafters, vocab=vocab, context=CONTEXT, costs=costs, executor=executor)
    return Subject(name, engine, head, name in ASSISTANTS)


def device_of(engine: Engine) -> DeviceExecutor:
    """Its executor."""
    assert isinstance(engine.executor, DeviceExecutor)
    return engine.executor


def floor(subject: Subject) -> float:
    """Seconds of all linear layers of one row by cuBLAS, in one graph: those that a plain step has to read."""
    matrices = step_matrices(subject.engine.model)
    inputs = {
        matrix.shape[1]: torch.randn(1, matrix.shape[1], device="cuda", dtype=torch.bfloat16) for matrix in matrices
    }

    def launch() -> list[Tensor]:
        return [F.linear(inputs[m.shape[1]], m.weight) for m in matrices if isinstance(m, FloatMatrix)]

    return device_seconds(captured(launch))


def running(engine: Engine, draft: str, depth: int | None, sampling: SamplingParams = GREEDY) -> None:
    """A sequence in the middle of its answer."""
    prompt = tuple((31 * n + 5) % engine.vocab for n in range(PROMPT))
    wish = Request(prompt, sampling, CONTEXT - PROMPT - 1, draft=draft, draft_tokens=depth)
    engine.submit(wish, Silence())
    while engine.scheduler.waiting or engine.scheduler.prefilling():
        engine.step()
    for _ in range(10):
        engine.step()


def stop(engine: Engine) -> None:
    for sequence in list(engine.scheduler.active):
        engine.release(sequence)


def rounds_of(engine: Engine, draft: str, depth: int | None, sampling: SamplingParams = GREEDY) -> tuple[float, float]:
    """Wall seconds of a round in the engine, and device seconds of its graph alone."""
    running(engine, draft, depth, sampling)
    walls = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        walls.append((time.perf_counter() - began) / STEPS)
    engine.settle()
    drafts = depth or 0
    shape = Shape(1, 1 + drafts, draft in ("mtp", "assistant"), sampling.filtered, sampling.needs_edits, drafts)
    rounds = device_of(engine).rounds
    graph_seconds = device_seconds(lambda: rounds.launch(shape))
    stop(engine)
    return statistics.median(walls), graph_seconds


def pass_of(engine: Engine, width: int) -> Callable[[], Output]:
    """Runs a target pass of the one sequence that is in the middle of its answer."""
    decoder, pool, slots = engine.model, engine.pool, device_of(engine).slots
    states = () if pool.states is None else pool.states.layers
    rows = PassRows.uniform(
        width, slots.position[:1].clone(), [table[:1] for table in slots.tables], slots.recurrent[:1], states
    )
    tokens = torch.arange(5, 5 + width, device="cuda")
    return lambda: decoder.forward(Pass(tokens, rows, pool.layers, None, False))


def pass_seconds(engine: Engine, width: int) -> tuple[float, int]:
    """Device seconds of a target pass of one sequence in the middle of its answer, and the bytes of its weights."""
    running(engine, "off", None)
    engine.settle()
    launch = pass_of(engine, width)
    seconds, weights = device_seconds(captured(launch)), pass_bytes(engine.model, chosen_experts(engine.model, launch))
    stop(engine)
    return seconds, weights


def print_kernels(engine: Engine) -> None:
    """Where the time of a narrow and of a wide pass goes, kernel by kernel."""
    running(engine, "off", None)
    engine.settle()
    for width in (1, 8):
        replay = captured(pass_of(engine, width))
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            replay()
            torch.cuda.synchronize()
        print(f"a pass of width {width}:", flush=True)
        print(found.key_averages().table(sort_by="self_device_time_total", row_limit=32), flush=True)
    stop(engine)


def draft_seconds(subject: Subject) -> float:
    """Device seconds of one step of the head: block, output matrix, choice."""
    engine, head = subject.engine, subject.head
    half, slots = device_of(engine).half, device_of(engine).slots
    assert head is not None and isinstance(half, MtpDeviceHalf)
    running(engine, "mtp", 1)
    engine.settle()
    hidden = torch.randn(1, head.embedding.shape[1], device="cuda", dtype=torch.bfloat16)
    token, out = torch.tensor([5], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    bad, place = torch.zeros(1, dtype=torch.int32, device="cuda"), slots.position[:1].long() + 1
    rows = PassRows.uniform(1, slots.position[:1].clone(), [half.table[:1]], slots.recurrent[:1])
    pages = half.pool.layers

    def launch() -> None:
        last = head.forward(hidden, Pass(token, rows, pages, None, False))
        logits, vocab = head.logits(last), head.output.shape[0]
        choose_tokens(logits, vocab, slots.temperature[:1], slots.seed[:1], place, out, bad, ids=head.vocabulary)

    seconds = device_seconds(captured(launch))
    stop(engine)
    return seconds


def assistant_seconds(engine: Engine) -> float:
    """Device seconds of one step of an assistant: what four drafts add to a round."""
    running(engine, "assistant", 4)
    engine.settle()
    rounds, seconds = device_of(engine).rounds, []
    for drafts in (4, 0):
        shape = Shape(1, 5, True, False, False, drafts)
        if shape not in rounds:
            rounds.capture(shape)
        seconds.append(device_seconds(partial(rounds.launch, shape)))
    stop(engine)
    return (seconds[0] - seconds[1]) / 4


def measure_subject(subject: Subject) -> dict[str, float]:
    """All cells of one model."""
    engine = subject.engine
    cells = {"floor_ms": 1e3 * floor(subject)}
    wall, device = rounds_of(engine, "off", None)
    cells |= {"plain_ms": 1e3 * device, "plain_wall_ms": 1e3 * wall}
    cells["plain_over_floor"] = cells["plain_ms"] / cells["floor_ms"]
    cells["host_share"] = max(0.0, 1 - device / wall)
    cells["filtered_wall_ms"] = 1e3 * rounds_of(engine, "off", None, FILTERED)[0]
    cells["filtered_over_plain"] = cells["filtered_wall_ms"] / cells["plain_wall_ms"]
    (narrow, few), (wide, many) = (pass_seconds(engine, width) for width in (1, 8))
    cells |= {"pass_1_ms": 1e3 * narrow, "pass_8_ms": 1e3 * wide, "width_8_over_1": wide / narrow}
    # Of dense models it is 1; eight rows of a mixture go to more experts than one.
    cells |= {"weights_1_gb": few / 1e9, "weights_8_gb": many / 1e9, "weights_8_over_1": many / few}
    if subject.assisted:
        cells["draft_step_ms"] = 1e3 * assistant_seconds(engine)
        cells["draft_step_over_plain"] = cells["draft_step_ms"] / cells["plain_ms"]
        wall, device = rounds_of(engine, "assistant", 4)
        cells |= {"assistant_4_ms": 1e3 * device, "assistant_4_wall_ms": 1e3 * wall}
    if subject.head is not None:
        cells["draft_step_ms"] = 1e3 * draft_seconds(subject)
        cells["draft_step_over_plain"] = cells["draft_step_ms"] / cells["plain_ms"]
        wall, device = rounds_of(engine, "mtp", 4)
        cells |= {
            "mtp_4_ms": 1e3 * device,
            "mtp_4_wall_ms": 1e3 * wall,
            "mtp_4_host_share": max(0.0, 1 - device / wall),
        }
    return cells


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
    parser.add_argument("--model", default="smollm2", help="the built-in model, or where its file is")
    parser.add_argument("--peer", choices=PEERS, default="eager", help="transformers beside it")
    parser.add_argument("--profile", action="store_true", help="kernels of a pass by kind: where its time goes")


def measure(options: Namespace) -> dict[str, Any]:
    """All models, each beside transformers."""
    torch.manual_seed(0)
    table: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name in SUBJECTS if options.only is None else (options.only,):
            subject = built_in(options.model) if name == "smollm2" else random_subject(name)
            table[name] = cells = measure_subject(subject)
            show(name, cells)
            if options.profile:
                print_kernels(subject.engine)
            del subject
            torch.cuda.empty_cache()
            for peer in PEERS[options.peer]:
                cells |= beside(name, peer, options.model, cells["plain_wall_ms"])
    return table


def beside(name: str, peer: str, model: str, plain_ms: float) -> dict[str, float]:
    """What transformers takes for the same, or nothing where it does not run."""
    try:
        with folder_of(model) if name == "smollm2" else nullcontext() as folder:
            given = None if folder is None else str(folder)
            milliseconds = 1e3 * transformers_seconds(SHAPES.get(name), given, peer == "best")
    except Exception as error:  # noqa: BLE001 - whatever a peer dies of is a result, and no reason to stop
        print(f"{name}: transformers ({peer}) does not run here: {str(error).splitlines()[0]}", flush=True)
        return {}
    found = {f"transformers_{peer}_ms": milliseconds, f"versus_transformers_{peer}": milliseconds / plain_ms}
    show(name, found)
    torch.cuda.empty_cache()
    return found


def show(name: str, cells: dict[str, float]) -> None:
    """As they come: a peer may take minutes."""
    for cell, value in cells.items():
        print(f"{name:12} {cell:28} {value:9.4f}", flush=True)


def built_in(model: str) -> Subject:
    """The real small model with its head."""
    loaded = load_model(model, device="cuda", max_context=CONTEXT)
    drafter = loaded.engine.drafters.by_name.get("mtp")
    return Subject("smollm2", loaded.engine, getattr(drafter, "head", None))
