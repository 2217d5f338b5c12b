"""Passes on a CPU, written down once and replayed: Python costs nothing for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.cpu.ops import CpuKernels
from forerun.kernels.cpu.recording import Recorder, Rows
from forerun.kernels.interface import LayerPages
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.layer import Layer
from forerun.models.layers.mixers import AllAngles
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rope import Rope, RopeTables
from forerun.models.layers.rows import Output, Pass, Target

SMALL = 16  # rows that a first recording has room for: with more room the memory of a pass leaves the core's cache
GROWTH = 4  # times as many rows in the next larger one

# Writes a pass down: the recorder, the pass as far as it is known, angles and inputs → logits, if any, and outputs.
Writer = Callable[[Any, Pass, AllAngles, list[Any]], tuple[Any, list[Any]]]


# Layers of pages that rows are stored in, and page groups of their pool; nowhere: rows have no place in a sequence.
LayerPlace = tuple[list[LayerPages], int]
NOWHERE: LayerPlace = ([], 0)


class RecordedCall:
    """One thing that is computed for the rows of a pass; a recording for each size."""

    def __init__(
        self, kernels: CpuKernels, write: Writer, inputs: Sequence[int], rope: RopeTables, place: LayerPlace = NOWHERE
    ) -> None:
        """`inputs`: columns of each."""
        self._kernels, self._write, self._inputs, self._rope, self._place = kernels, write, inputs, rope, place
        self._sizes: dict[tuple[int, bool], Recorded] = {}

    def __call__(self, inputs: Sequence[Tensor], batch: Pass | None, tokens: Tensor | None = None) -> Recorded:
        """Run it; the result's `logits` and `output` are what came out. `tokens`: as steps in Python see them."""
        room = SMALL
        while room < len(inputs[0]):
            room *= GROWTH
        key = room, batch is not None and batch.features
        if key not in self._sizes:
            layers, groups = self._place
            nothing: Any = None
            known = Pass(torch.empty(0, dtype=torch.long), nothing, layers, None, key[1])
            self._sizes[key] = Recorded(self._kernels, self._write, self._inputs, self._rope, known, groups, room)
        return self._sizes[key].run(inputs, batch, tokens)


class Recorded:
    """A recording for passes up to a size, and where its inputs and outputs are."""

    def __init__(
        self,
        kernels: CpuKernels,
        write: Writer,
        inputs: Sequence[int],
        rope: RopeTables,
        known: Pass,
        groups: int,
        room: int,
    ) -> None:
        turns, self._rope = rope.placeholders(), rope
        self._ropes: list[Rope] = list(turns)
        recorder = Recorder(kernels, room, groups, list(turns.values()))
        self._inputs: list[Rows] = [recorder.rows(columns) for columns in inputs]
        self.tokens = recorder.tokens
        logits, outputs = write(recorder, known, turns, list(self._inputs))
        self._columns = None if logits is None else logits.shape[1]
        self._outputs: list[Rows] = outputs
        self._recording = recorder.finish()
        self._wanted = 0
        self._count = 0
        self.logits: Tensor = torch.empty(0)  # of the last run [wanted rows, columns]

    def run(self, inputs: Sequence[Tensor], batch: Pass | None, tokens: Tensor | None) -> Recorded:
        """For the rows of a pass."""
        self._count = count = len(inputs[0])
        for place, values in zip(self._inputs, inputs, strict=True):
            place.view(count).copy_(values)
        self.tokens.value = tokens
        plan = self._recording.plan
        if batch is None:
            plan.fill_plain(count)
        else:
            angles = self._rope.angles(batch)
            plan.fill(batch.rows, [angles[rope] for rope in self._ropes], batch.wanted)
        self._wanted = int(plan.wanted_count[0])
        self.logits = torch.empty(self._wanted, self._columns or 0)
        self._recording.run(batch, self.logits)
        return self

    def output(self, index: int, wanted: bool = False) -> Tensor:
        """A copy of an output: of all rows, or of the wanted ones."""
        return self._outputs[index].view(self._wanted if wanted else self._count).clone()


def target_of(decoder: Decoder, layers: list[LayerPages], groups: int) -> Target:
    """What runs a decoder's passes: on a CPU recordings, elsewhere the decoder itself.

    `layers`: its pages; `groups`: page groups of their pool.
    """
    return RecordedTarget(decoder, (layers, groups)) if isinstance(decoder.kernels, CpuKernels) else decoder


def head_of(head: MtpHead, layers: list[LayerPages], groups: int) -> MtpHead | RecordedHead:
    """What runs a head, in the same way."""
    return RecordedHead(head, (layers, groups)) if isinstance(head.kernels, CpuKernels) else head


class RecordedTarget:
    """Runs a decoder's passes."""

    def __init__(self, decoder: Decoder, place: LayerPlace) -> None:
        assert isinstance(decoder.kernels, CpuKernels)
        self.decoder, self._place, self._kernels = decoder, place, decoder.kernels
        self._taps: tuple[int, ...] = ()
        self._layers: list[Layer] = []
        self._call = self._record()

    def _record(self) -> RecordedCall:
        self._taps, self._layers = self.decoder.taps, self.decoder.layers
        decoder = self.decoder

        def write(recorder: Any, known: Pass, turns: AllAngles, inputs: list[Any]) -> tuple[Any, list[Any]]:
            output = decoder.run(recorder, known, turns, inputs[0], recorder.tokens)
            return output.logits, [] if output.features is None else [output.features]

        return RecordedCall(self._kernels, write, [decoder.config.hidden], decoder.rope, self._place)

    def forward(self, batch: Pass) -> Output:
        """Run all rows; each sequence's pages and state take part."""
        # A head that looks at other layers came, or other weights: a recording knows where its weights are.
        if self._taps != self.decoder.taps or self._layers is not self.decoder.layers:
            self._call = self._record()
        x, tokens = self.decoder.inputs(batch)
        done = self._call([x], batch, tokens)
        return Output(done.logits, done.output(0) if batch.features else None)

    def logits(self, features: Tensor) -> Tensor:
        """Of rows that were run, by their features: float32 [rows, vocabulary]."""
        return self.decoder.logits(features)


class RecordedHead:
    """What a drafter asks of an MTP head, each a recording."""

    def __init__(self, head: MtpHead, place: LayerPlace) -> None:
        assert isinstance(head.kernels, CpuKernels)
        self._head, hidden = head, len(head.hidden_norm)
        kernels, rope = head.kernels, head.rope
        self.vocabulary = head.vocabulary

        def fuse(k: Any, _: Pass, __: AllAngles, x: list[Any]) -> tuple[None, list[Any]]:
            return None, [head.fuse_with(k, x[0])]

        def forward(k: Any, b: Pass, a: AllAngles, x: list[Any]) -> tuple[Any, list[Any]]:
            out = head.run(k, b, a, *x)
            return k.logits(out, head.output), [out]

        def fill(k: Any, b: Pass, a: AllAngles, x: list[Any]) -> tuple[None, list[Any]]:
            head.fill_with(k, b, a, *x)
            return None, []

        self._fuse = RecordedCall(kernels, fuse, [hidden * (len(head.taps) + 1)], rope)
        self._forward = RecordedCall(kernels, forward, [hidden, hidden], rope, place)
        self._fill = RecordedCall(kernels, fill, [hidden, hidden], rope, place)

    def fuse(self, features: Tensor) -> Tensor:
        """As the head's own method, like those that follow."""
        return features if self._head.fuse_matrix is None else self._fuse([features], None).output(0)

    def draft(self, hidden: Tensor, batch: Pass) -> tuple[Tensor, Tensor]:
        done = self._forward([self._head.embed(batch, hidden.dtype), hidden], batch)
        return done.output(0, wanted=True), done.logits

    def fill(self, hidden: Tensor, batch: Pass) -> None:
        self._fill([self._head.embed(batch, hidden.dtype), hidden], batch)
