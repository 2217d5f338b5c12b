"""Engines that run whole rounds on a device, or in Triton's interpreter, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CHUNK, CONTEXT, VOCAB, run
from heads import HeadShape, random_head, write_head
from tiny import tiny_model
from tiny_qwen import random_model, save_model
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.assistant import AssistantDrafter
from forerun.draft.assistant_loading import load_assistant
from forerun.draft.head import build_head
from forerun.draft.lookup import Lookup
from forerun.draft.model import ModelDrafter
from forerun.draft.mtp import MtpDrafter
from forerun.draft.protocol import RowDrafter
from forerun.engine.captures import Graphs
from forerun.engine.device_runner import DeviceRunner
from forerun.engine.engine import Engine
from forerun.kernels.cuda import CudaKernels
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output, Pass
from forerun.policy.decision import PLAIN, Decision
from forerun.policy.policy import Ask
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


def tiny_hybrid(path: Path) -> Path:
    """With a recurrent layer, a layer with attention and a head."""
    few = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 32}
    return save_model(path, random_model(False, vocab_size=VOCAB, **few))


def tiny_head(path: Path, folder: Path) -> Path:
    shape = HeadShape(32, heads=2, kv_heads=1, size=16, inner=48, taps=(0,))
    return write_head(path, folder, shape, random_head(shape), list(range(4, 290, 2)))


def device_engine(
    folder: Path,
    head: Path | None,
    *,
    native: bool = False,
    assistant: Path | None = None,
    draft_model: Path | None = None,
    drafter: RowDrafter | None = None,
    pages: int = 60,
    context: int = CONTEXT,
    chunk: int = CHUNK,
    prefix_cache: bool = False,
) -> Engine:
    """`native`: with the head that the model brings; `drafter`: one more that goes along with rows."""
    decoder = build(open_checkpoint(folder), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
    rows: dict[str, RowDrafter] = {}
    built = (
        build_head(read_head(head), decoder, VOCAB) if head is not None else decoder.native_head() if native else None
    )
    if built is not None:
        decoder.taps = built.taps
        built.rope.reserve(2 * CONTEXT)
        rows["mtp"] = MtpDrafter(built, VOCAB)
    if assistant is not None:
        rows["assistant"] = AssistantDrafter(load_assistant(assistant, decoder, "n-1"), VOCAB)
    if draft_model is not None:
        small = build(open_checkpoint(draft_model), CudaKernels(DEVICE), DEVICE, torch.float32, NullProgress())
        small.rope.reserve(2 * CONTEXT)
        rows["model"] = ModelDrafter(small, VOCAB)
    if drafter is not None:
        rows[drafter.name] = drafter
    decoder.rope.reserve(2 * CONTEXT)
    if DEVICE.type == "cpu":
        spoil_results(decoder)
    parts = {name: drafter.specs for name, drafter in rows.items()}
    pool = PagePool.for_model(decoder.config, pages, PAGE, torch.float32, DEVICE, slots=4, on_device=True, parts=parts)
    sizes: dict[str, Any] = {"vocab": VOCAB, "context": context, "chunk": chunk, "prefix_cache": prefix_cache}
    return Engine(decoder, pool, {"lookup": Lookup(), **rows}, **sizes)


def capture_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured runs once before, for no sequence; where that fails, nothing is captured."""

    def capture(graphs: Graphs, launch: Callable[[], Any]) -> Callable[[], Any]:
        launch()
        return launch

    monkeypatch.setattr(Graphs, "real", True)
    monkeypatch.setattr(Graphs, "capture", capture)


def spoil_results(model: Decoder) -> None:
    """What a pass gave is gone when the next one begins, as where captured graphs share their memory."""
    usual, given = model.forward, list[Tensor]()

    def forward(batch: Pass) -> Output:
        for tensor in given:
            tensor.fill_(float("nan"))
        output = usual(batch)
        given[:] = [tensor for tensor in (output.logits, output.features) if tensor is not None]
        return output

    model.forward = forward  # type: ignore[method-assign]


class Knowing(RowDrafter):
    """Drafts what texts go on with: by the token and its position, all others by 3. It keeps nothing."""

    name, vocab = "mtp", VOCAB

    def __init__(self, *texts: list[int]) -> None:
        self.next = torch.full((2 * CONTEXT, VOCAB), 3, device=DEVICE)
        for text in texts:
            for at, (token, after) in enumerate(pairwise(text)):
                self.next[at, token] = after

    @property
    def weight_bytes(self) -> int:
        return 0

    def attach(self, pool: PagePool) -> None: ...

    def step(self, number: int, hidden: Tensor | None, batch: Pass) -> tuple[None, Tensor]:
        assert batch.rows.tables is not None
        after = self.next[batch.rows.tables.at.long(), batch.tokens]
        return None, 1000.0 * torch.nn.functional.one_hot(after, VOCAB).float()


def tell(engine: Engine, decide: Callable[[Ask], Decision]) -> None:
    """Its policy decides so for each sequence that generates, as far as it may draft at all."""

    def limited(ask: Ask) -> Decision:
        wish = decide(ask)
        depth = min(ask.limit, wish.depth)
        if wish.arm is None or (wish.drafter not in engine.drafters.rows and not (ask.available or {}).get(wish.arm)):
            depth = 0
        return Decision(wish.arm, depth) if depth else PLAIN

    engine.policy.decide = lambda asks: [limited(ask) for ask in asks]  # type: ignore[method-assign]


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


def answers(engine: Engine, *requests: Any) -> list[list[int]]:
    return [sequence.answer for sequence in run(engine, *requests)]
