"""Small engines for tests: tiny pages and chunks, so that every border is crossed within a few tokens."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.cache.pages import NO_PARTS, PagePool, Parts
from forerun.draft.lookup import Lookup
from forerun.draft.model import ModelDrafter
from forerun.draft.protocol import Draft, Drafter, RowDrafter, Want
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.sequence import Sequence as Running
from forerun.engine.sequence import Status
from forerun.models.families import build
from forerun.models.layers.decoder import Decoder
from forerun.progress import NullProgress
from forerun.sample.parameters import SamplingParams
from forerun.weights.checkpoint import open_checkpoint

PAGE, CHUNK, VOCAB, CONTEXT = 8, 16, 290, 256
CPU = torch.device("cpu")


class NoText:
    """For tests of tokens alone."""

    def push(self, token: int) -> tuple[str, bool]:
        return "", False

    def flush(self) -> str:
        return ""


class Impatient(NoText):
    """Presses Ctrl-C in the middle of a token, once in every round."""

    pressed = False

    def push(self, token: int) -> tuple[str, bool]:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().push(token)


def decoder(folder: Path, quantize: bool) -> Decoder:
    from forerun.kernels.cpu import CpuKernels  # needs numba, which a machine with a GPU may lack

    return build(open_checkpoint(folder), CpuKernels(quantize), CPU, torch.float32, NullProgress())


def pool_for(model: Decoder, pages: int = 400, parts: Parts = NO_PARTS) -> PagePool:
    return PagePool.for_model(model.config, pages, PAGE, torch.float32, CPU, slots=6, parts=parts)


def engine(
    model: Decoder,
    *,
    draft_model: Decoder | None = None,
    beside: Sequence[RowDrafter] = (),
    pages: int = 400,
    **options: Any,
) -> Engine:
    """`beside`: row drafters."""
    rows = [*beside, *([] if draft_model is None else [ModelDrafter(draft_model, VOCAB)])]
    drafters: dict[str, Drafter] = {"lookup": Lookup(), **{drafter.name: drafter for drafter in rows}}
    pool = pool_for(model, pages, {drafter.name: drafter.specs for drafter in rows})
    return Engine(model, pool, drafters, **{"vocab": VOCAB, "context": CONTEXT, "chunk": CHUNK, **options})


def request(prompt: Sequence[int], *, max_tokens: int | None = 40, draft: str = "off", **options: Any) -> Request:
    own = {name: options.pop(name) for name in ("draft_tokens", "accept", "stop_ids") if name in options}
    return Request(tuple(prompt), SamplingParams(**options), max_tokens, draft=draft, **own)  # type: ignore[arg-type]


@torch.inference_mode()
def finish(engine: Engine, sequences: Sequence[Running], steps: int = 5000) -> None:
    """Run until all are done; a hang fails."""
    for _ in range(steps):
        if all(s.status is Status.FINISHED for s in sequences):
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, *requests: Request, warned: bool = False) -> list[Running]:
    """Submit all, run to the end, release; the answers stay readable. `warned`: a drafter may be switched off."""
    sequences = [engine.submit(r, NoText()) for r in requests]
    finish(engine, sequences)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
        assert warned or not sequence.warnings, "a drafter was switched off"
        engine.release(sequence)
    engine.pool.check([s.cache for s in engine.scheduler.active])
    return sequences


class Scripted:
    """A drafter that proposes what a function of the text so far says."""

    def __init__(self, script: Any, name: str = "lookup") -> None:
        self.name, self.script = name, script
        self.texts: dict[int, list[int]] = {}

    def open(self, sequence_id: int, tokens: list[int]) -> None:
        self.texts[sequence_id] = list(tokens)

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        self.texts[sequence_id] += tokens

    def propose(self, wants: list[Want]) -> list[Draft]:
        return [Draft(list(self.script(self.texts[want.sequence_id], want.depth))) for want in wants]

    def ready(self, sequence_id: int) -> bool:
        return True

    def peek(self, sequence_id: int, depth: int) -> list[int]:
        return []

    def close(self, sequence_id: int) -> None:
        self.texts.pop(sequence_id, None)
