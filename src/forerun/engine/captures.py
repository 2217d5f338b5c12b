"""What a device's rounds are captured for, the graphs, and what the host tells them of a round's rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Some
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from forerun.engine.slots import SLOTS
from forerun.kernels.interface import WIDEST
from forerun.kernels.packed import Packed
from forerun.models.layers.decoder import Decoder

Found = TypeVar("Found")
# What rounds without prompts are captured for: batch slots, rows of the sequence that has most, and rows of all as
# multiples of the slots.
LINES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
MANY_WIDTHS, FEW = (1, 2, 4, 8, 16), 8  # where there are more slots than a few
# And rounds with prompts, where a few rows more or less make no difference. The largest are for pictures that see
# themselves whole.
PROMPT_LINES, PROMPT_WIDTHS = (1, 8, 64), (1, 4, 8, 16)
PROMPT_ROWS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
CHUNKS = (16, 112, 320)  # stretches of up to `CHUNK_ROWS` rows of prompts
SMALL, FEW_CHUNKS = 256, 16  # rows and stretches that the smaller of two uploads has room for
GRAPHS = 1 << 30  # bytes of what captured graphs hold for themselves, of attention's scratch and of batch slots


def bucket(sizes: Some[int], wanted: int) -> int:
    """The smallest of the sizes that is enough."""
    return next(size for size in sizes if size >= wanted)


def bucketed(shape: PassShape) -> PassShape:
    """The smallest shape that is captured for a round of this one."""
    if shape.chunks:
        lines, width = bucket(PROMPT_LINES, shape.lines), bucket(PROMPT_WIDTHS, shape.width)
        rows, chunks = bucket(PROMPT_ROWS, shape.rows), bucket(CHUNKS, shape.chunks)
        return shape._replace(rows=rows, lines=lines, width=width, chunks=chunks)
    lines = bucket(LINES, shape.lines)
    width = bucket(WIDTHS if lines <= FEW else MANY_WIDTHS, shape.width)
    return shape._replace(rows=lines * bucket(WIDTHS, -(-shape.rows // lines)), lines=lines, width=width)


def working_memory(decoder: Decoder, chunk: int) -> int:
    """Bytes that passes will want beside weights and pages: an estimate, on the safe side.

    Graphs are captured when a round first needs them, long after the cache has taken its place. They share one pool of
    memory, so what counts is the largest pass: logits of the widest round, as they are and edited; or the rows of
    prompts through the widest layer, with what sums of products are split into.
    """
    logits = SLOTS * WIDEST * decoder.config.vocab * 2 * 4
    layer = chunk * max(sum(matrix.shape) for layer in decoder.layers for matrix in layer.shapes()) * 2 * 4
    return GRAPHS + logits + layer


class Graphs:
    """Where captured graphs keep what they compute. They share it: a result is read before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def real(self) -> bool:
        """Is anything captured? Elsewhere work is launched anew each time."""
        return self._pool is not None

    def capture(self, launch: Callable[[], Found]) -> Callable[[], Found]:
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

        def replay() -> Found:
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


class PassShape(NamedTuple):
    """What a pass and its choice are captured for."""

    rows: int
    lines: int  # batch slots
    width: int  # rows of each whose logits are needed
    chunks: int  # of prompts
    features: bool  # does a drafter read what the pass computes?
    follows: frozenset[str]  # row drafters that write entries
    filtered: bool
    edited: bool  # are logits changed by biases, penalties or masks?

    def holds(self, other: PassShape) -> bool:
        """Can a round of the other shape run as one of this? Entries that no drafter reads do no harm."""
        if any(mine < wanted for mine, wanted in zip(self[:4], other[:4], strict=True)):
            return False
        same = (self.features, self.filtered, self.edited) == (other.features, other.filtered, other.edited)
        return same and bool(self.chunks) == bool(other.chunks) and self.follows >= other.follows


class DraftShape(NamedTuple):
    """What drafting is captured for."""

    drafter: str
    depth: int
    lines: int
    edited: bool


class Upload:
    """What the host says of the rows of a round, and of its batch slots."""

    def __init__(self, rows: int, chunks: int, device: torch.device) -> None:
        whole, small, lines = torch.int64, torch.int32, SLOTS + 1
        self._packed = Packed(
            device,
            {
                "wanted": (whole, (SLOTS * WIDEST,)),  # rows that have logits, line by line
                **dict.fromkeys(("token", "place", "owner", "source"), (small, (rows,))),
                "turns": (small, (SLOTS, 3)),
                **dict.fromkeys(("chunks", "stretches"), (small, (chunks, 3))),
                **dict.fromkeys(("live", "drafted", "recurrent", "tail", "drafting", "first"), (small, (lines,))),
            },
        )
        self.here, self.there, self.send = self._packed.here, self._packed.there, self._packed.send
