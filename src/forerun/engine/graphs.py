"""Work on a device that is launched the same way again and again: captured once as a CUDA graph, then replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from forerun.cache.device_recurrent import DeviceStates
from forerun.cache.pages import PagePool
from forerun.engine.probe import RowCounts
from forerun.kernels.interface import WIDEST, Chunk, PassRows
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Output, Pass

Result = TypeVar("Result")
PROMPTS = (16, 32, 64, 128, 256, 384, 512)  # tokens that a first chunk of a prompt is captured for
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # sequences a graph is captured for; smaller batches have idle slots


GRAPHS = 512 << 20  # bytes of what captured graphs hold for themselves, and of the buffers of batch slots


def working_memory(decoder: Decoder, chunk: int) -> int:
    """Bytes that passes will want beside weights and pages: an estimate, on the safe side.

    Graphs are captured when a round first needs them, long after the cache has taken its place. They share one pool of
    memory, so what counts is the largest pass: logits of the widest round, as they are and edited; or a chunk of a
    prompt through the widest layer, with what sums of products are split into.
    """
    logits = BATCH_SIZES[-1] * WIDEST * decoder.config.vocab * 2 * 4
    layer = chunk * max(sum(matrix.shape) for layer in decoder.layers for matrix in layer.shapes()) * 2 * 4
    return GRAPHS + logits + layer


def batch_size_for(sequences: int) -> int:
    """The smallest batch with a graph that holds so many sequences."""
    return next(count for count in BATCH_SIZES if count >= sequences)


class Graphs:
    """Where captured graphs keep what they compute. They share it: a result is read before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def real(self) -> bool:
        """Is anything captured? Elsewhere work is launched anew each time."""
        return self._pool is not None

    def capture(self, launch: Callable[[], Result]) -> Callable[[], Result]:
        """`launch` reads and writes static buffers only. It runs once here, so that whatever must compile does.

        What comes back replays it; where there are no graphs it is launched anew.
        """
        if not self.real:
            return launch
        with torch.cuda.device(self.device):  # both what is captured and where it runs follow the current one
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                launch()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.graph(graph, pool=self._pool):
                result = launch()

        def replay() -> Result:
            graph.replay()
            return result

        return replay


@contextmanager
def no_collection() -> Iterator[None]:
    """What dies in a collection may own a graph, and none may be destroyed while another is captured."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def spare_tables(pool: PagePool, size: int, pages: int) -> list[Tensor]:
    """A block table [size, pages] for each page group, in which nobody has a page."""
    shape = (size, pages)
    return [torch.full(shape, pool.spare_page, dtype=torch.int32, device=pool.device) for _ in pool.groups]


class GraphedTarget:
    """The target on a device: passes are replayed from graphs, of rounds one per size of batch and width."""

    def __init__(self, decoder: Decoder, pool: PagePool, graphs: Graphs, pages: int) -> None:
        """`pages`: the most a sequence may hold."""
        self.decoder, self.pool, self.graphs = decoder, pool, graphs
        most, device = BATCH_SIZES[-1], pool.device
        self.position = torch.zeros(most, dtype=torch.int32, device=device)
        self.tables = spare_tables(pool, most, pages)
        self.slot = torch.full((most,), pool.spare_slot, dtype=torch.int32, device=device)
        self.counts = RowCounts(decoder)
        self.prompts = GraphedPrompts(decoder, pool, graphs, pages)
        self.passes: dict[tuple[int, int, bool], tuple[Tensor, Callable[[], Output]]] = {}  # by size, width, features

    def forward(self, batch: Pass) -> Output:
        """As `Decoder.forward`. What comes out is overwritten by the next pass."""
        rows = batch.rows
        if self.prompts.takes(batch):
            return self.prompts.forward(batch)
        if batch.prefill or batch.wanted is not None or rows.width > WIDEST:
            return self.decoder.forward(batch)
        sequences, size = len(rows.position), batch_size_for(len(rows.position))
        if sequences > 1 and not self.counts.keep_bits(size * rows.width):
            return self._in_halves(batch)
        key = (size, rows.width, batch.features)
        if key not in self.passes:
            self._idle()
            self.passes[key] = self._capture(*key)
        tokens, replay = self.passes[key]
        self._idle()
        tokens[: len(batch.tokens)] = batch.tokens
        self.position[:sequences] = rows.position
        for mine, theirs in zip(self.tables, rows.block_tables, strict=True):
            mine[:sequences, : theirs.shape[1]] = theirs
        self.slot[:sequences] = rows.slot
        output, count = replay(), len(batch.tokens)
        features = None if output.features is None else output.features[:count]
        return Output(output.logits[:count], features)

    def logits(self, features: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        return self.decoder.logits(features)

    def _in_halves(self, batch: Pass) -> Output:
        """Narrower passes, one after another: with so many rows at once a product changes bits."""
        outputs, rows = [], batch.rows
        middle = (len(rows.position) + 1) // 2
        for part in (slice(0, middle), slice(middle, None)):
            tables = [table[part] for table in rows.block_tables]
            half = PassRows.uniform(rows.width, rows.position[part], tables, rows.slot[part], rows.states)
            tokens = batch.tokens.view(-1, rows.width)[part].flatten()
            output = self.forward(replace(batch, tokens=tokens, rows=half))
            outputs.append([None if x is None else x.clone() for x in (output.logits, output.features)])
        logits, features = zip(*outputs, strict=True)
        return Output(torch.cat(logits), torch.cat(features) if batch.features else None)

    def _idle(self) -> None:
        """Nobody's rows: what a capture's first run writes must harm no one."""
        self.position.zero_()
        for table in self.tables:
            table.fill_(self.pool.spare_page)
        self.slot.fill_(self.pool.spare_slot)

    def _capture(self, size: int, width: int, features: bool) -> tuple[Tensor, Callable[[], Output]]:
        tokens = torch.zeros(size * width, dtype=torch.int64, device=self.pool.device)
        states = () if self.pool.states is None else self.pool.states.layers
        tables = [table[:size] for table in self.tables]
        rows = PassRows.uniform(width, self.position[:size], tables, self.slot[:size], states)
        batch = Pass(tokens, rows, self.pool.layers, None, False, features)
        return tokens, self.graphs.capture(lambda: self.decoder.forward(batch))


class GraphedPrompts:
    """The first chunk of a prompt, which is mostly all of it: the host would take ten times as long as the device.

    It is padded to a length that a graph is captured for. A row sees nothing of rows after it, so padding changes no
    result; what it writes lies after the prompt, where the answer will be written. Recurrent layers are told of it.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, graphs: Graphs, pages: int) -> None:
        """`pages`: the most a sequence may hold."""
        self.decoder, self.pool, self.graphs = decoder, pool, graphs
        device = pool.device
        self.tokens = torch.zeros(PROMPTS[-1], dtype=torch.int64, device=device)
        room = max(pages, pool.pages_for(PROMPTS[-1]))
        self.tables = spare_tables(pool, 1, room)
        self.wanted = torch.zeros(1, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, dtype=torch.int32, device=device)
        self.slot = torch.full((1,), pool.spare_slot, dtype=torch.int32, device=device)
        states = pool.states
        self.state = states.first_stage(PROMPTS[-1]) if isinstance(states, DeviceStates) else None
        self.passes: dict[tuple[int, bool], Callable[[], Output]] = {}  # by tokens and features

    def takes(self, batch: Pass) -> bool:
        """Is it a first chunk of text alone?"""
        chunk = batch.rows.chunk
        first = batch.prefill and chunk is not None and chunk.position == 0 and batch.media is None
        return first and batch.rows.width <= PROMPTS[-1] and batch.wanted is not None

    def forward(self, batch: Pass) -> Output:
        """As `Decoder.forward`. The logits are overwritten by the next pass."""
        rows, count = batch.rows, len(batch.tokens)
        assert batch.wanted is not None
        key = (next(size for size in PROMPTS if size >= count), batch.features)
        for table in self.tables:
            table.fill_(self.pool.spare_page)
        if key not in self.passes:
            self.wanted.zero_()
            self.passes[key] = self._capture(*key)
        for mine, theirs in zip(self.tables, rows.block_tables, strict=True):
            mine[:, : theirs.shape[1]] = theirs
        self.tokens[:count] = batch.tokens
        self.tokens[count : key[0]] = batch.tokens[-1]  # its own: nothing of another request may be near
        self.wanted.copy_(batch.wanted)
        output = self.passes[key]()
        if self.state is not None:
            staged = rows.stage_of(0)
            assert staged is not None
            staged.state, staged.inputs = self.state[1].state, self.state[1].inputs  # committed before the next pass
        # Drafters see them when the round is delivered: the host may run another pass before.
        features = None if output.features is None else output.features[:count].clone()
        return Output(output.logits, features)

    def _capture(self, count: int, features: bool) -> Callable[[], Output]:
        rows = PassRows.uniform(count, self.start, self.tables, self.slot)
        rows.chunk = Chunk(0, last=self.wanted)
        if self.state is not None:
            rows.states, rows.staged = self.state[0], [self.state[1]]
        batch = Pass(self.tokens[:count], rows, self.pool.layers, self.wanted, True, features)
        return self.graphs.capture(lambda: self.decoder.forward(batch))
