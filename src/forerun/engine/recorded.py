"""A model on a CPU, its passes written down once and replayed: Python costs nothing for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.cpu.recording import Later, Recorder, Recording, Rows
from forerun.kernels.interface import Angles
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Output, Pass

SMALL = 16  # rows that a first recording has room for: more of them, and the memory of a pass leaves the core's cache


class RecordedTarget:
    """Runs a decoder's passes; the first of each size is written down on the way."""

    def __init__(self, decoder: Decoder, pool: PagePool) -> None:
        assert isinstance(decoder.kernels, CpuKernels)
        self.decoder, self.pool, self._kernels = decoder, pool, decoder.kernels
        self._passes: dict[tuple[int, bool, tuple[int, ...]], RecordedPass] = {}

    def forward(self, batch: Pass) -> Output:
        """Run all rows; each sequence's pages and state take part."""
        count = len(batch.tokens)
        room = SMALL
        while room < count:
            room *= 4
        key = room, batch.features, self.decoder.taps
        if key not in self._passes:
            self._passes[key] = RecordedPass(self.decoder, self._kernels, self.pool, room, batch.features)
        return self._passes[key].run(batch)

    def logits(self, features: Tensor) -> Tensor:
        """Of rows that were run, by their features: float32 [rows, vocabulary]."""
        return self.decoder.logits(features)


class RecordedPass:
    """One recording and where its inputs and outputs are."""

    def __init__(self, decoder: Decoder, kernels: CpuKernels, pool: PagePool, room: int, features: bool) -> None:
        self._decoder = decoder
        turns: dict[Rope, Angles] = decoder.rope.placeholders()
        self._ropes = list(turns)
        recorder = Recorder(kernels, room, len(pool.groups), list(turns.values()))
        self._input, self._tokens = recorder.rows(decoder.config.hidden), Later()
        rows: Any = None
        batch = Pass(torch.empty(0, dtype=torch.long), rows, pool.layers, None, False, features)
        inputs: tuple[Any, Any] = self._input, self._tokens
        output = decoder.run(recorder, batch, turns, *inputs)
        self._features: Any = output.features
        assert self._features is None or isinstance(self._features, Rows)
        self._recording: Recording = recorder.finish()

    def run(self, batch: Pass) -> Output:
        """The rows of a pass."""
        decoder, count = self._decoder, len(batch.tokens)
        x, self._tokens.value = decoder.inputs(batch)
        self._input.view(count).copy_(x)
        angles = decoder.rope.angles(batch)
        turns = [(angles[rope].cos, angles[rope].sin) for rope in self._ropes]
        plan = self._recording.plan
        plan.fill(batch.rows, turns, batch.wanted)
        if batch.wanted is None:
            plan.wanted[:count] = range(count)
        wanted = int(plan.wanted_count[0])
        logits = torch.empty(wanted, decoder.head.shape[0])
        self._recording.run(batch, logits)
        return Output(logits, None if self._features is None else self._features.view(count).clone())
