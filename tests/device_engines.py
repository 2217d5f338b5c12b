"""Engines that run whole rounds on a device, or in Triton's interpreter, for the tests of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, CONTEXT, VOCAB, run
from heads import HeadShape, random_head, write_head
from tiny import tiny_model

from forerun.cache.pages import PagePool
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.assistant_loading import load_assistant
from forerun.draft.head import build_head
from forerun.draft.lookup import Lookup
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import Drafter
from forerun.engine.device import DeviceExecutor, device_executor
from forerun.engine.drafters import Drafters
from forerun.engine.engine import Engine
from forerun.engine.host import HostExecutor
from forerun.kernels.cuda import CudaKernels
from forerun.kernels.interface import AttentionSpec
from forerun.loading import attach_head, graphed
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.policy.costs import CostTable
from forerun.progress import NullProgress
from forerun.weights.checkpoint import open_checkpoint
from forerun.weights.heads import read_head

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOW = pytest.mark.long if DEVICE.type == "cpu" else pytest.mark.kernels  # minutes in the interpreter
PAGE, TOKENS = 16, 9 if DEVICE.type == "cuda" else 6
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
PROMPTS = [[5, 6, 7, 8, 9], [40, 41] * 9, [100 + n for n in range(20)]]
SOME = PROMPTS if DEVICE.type == "cuda" else PROMPTS[:2]


def tiny_folder(path: Path) -> Path:
    return tiny_model(path, "llama", **SMALL)


def tiny_head(path: Path, folder: Path) -> Path:
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    return write_head(path, folder, shape, random_head(shape), list(range(4, 290, 2)))


def device_engine(
    folder: Path,
    head: Path | None,
    *,
    rounds: bool = True,
    native: bool = False,
    assistant: Path | None = None,
    pages: int = 60,
    context: int = CONTEXT,
) -> Engine:
    """`native`: with the head that the model brings."""
    decoder = build(open_checkpoint(folder), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    pool = PagePool.for_model(decoder.config, pages, PAGE, torch.float32, DEVICE, slots=4, on_device=True)
    drafters: dict[str, Drafter] = {"lookup": Lookup()}
    if head is not None:
        drafters["mtp"] = attach(head, decoder)
    brought = decoder.native_head() if native else None
    if brought is not None:
        drafters["mtp"] = attach_head(brought, decoder, pool, VOCAB, context)
    if assistant is not None:
        drafters["assistant"] = AssistantDrafter(load_assistant(assistant, decoder, "n-1"), pool, VOCAB)
    target = graphed(decoder, pool, context)
    costs = CostTable()
    executor: HostExecutor = device_executor(target, drafters, VOCAB, costs)
    if not rounds:
        executor = HostExecutor(target, Drafters(drafters, VOCAB), costs, restartable=False)
    sizes = {"vocab": VOCAB, "context": context, "chunk": CHUNK}
    return Engine(decoder, pool, drafters, costs=costs, executor=executor, **sizes)


def device_of(engine: Engine) -> DeviceExecutor:
    assert isinstance(engine.executor, DeviceExecutor)
    return engine.executor


def attach(head: Path, decoder: Decoder) -> MtpDrafter:
    built = build_head(read_head(head), decoder, VOCAB)
    decoder.taps = built.taps
    built.rope.reserve(2 * CONTEXT)
    pool = PagePool([AttentionSpec(built.layout)], 60, PAGE, torch.float32, DEVICE, on_device=True)
    return MtpDrafter(built, pool, VOCAB, CHUNK)


def answers(engine: Engine, *requests: Any) -> list[list[int]]:
    return [sequence.answer for sequence in run(engine, *requests)]
