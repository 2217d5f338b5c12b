"""What a model may ask of the machine: the operations, and the rows they work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from forerun.kernels.matrix import Matrix, Table, Weight


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Columns of a fused projection: queries, then keys, then values."""

    heads: int
    kv_heads: int
    size: int

    @property
    def key_column(self) -> int:
        return self.heads * self.size

    @property
    def value_column(self) -> int:
        return (self.heads + self.kv_heads) * self.size

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one attention layer reads keys. A layout without key heads: the layer reads those of another layer."""

    layout: HeadLayout
    window: int = 0  # keys a row sees, its own included; 0 means all before it
    scale: float | None = None  # that scores are multiplied by; None means head size ** -0.5
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0 leaves them as they are

    @property
    def factor(self) -> float:
        """That scores are multiplied by."""
        return self.layout.size**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """Shape of a gated delta rule layer. Columns of its convolution: queries, then keys, then values."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    window: int  # inputs the convolution sees, the row's own included

    @property
    def key_column(self) -> int:
        return self.key_heads * self.key_size

    @property
    def value_column(self) -> int:
        return 2 * self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def width(self) -> int:
        return self.value_column + self.values

    @property
    def record(self) -> int:
        """Columns of a recorded row: normalised keys, values, decay and strength of each value head."""
        return self.key_column + self.values + 2 * self.value_heads


@dataclass(slots=True)
class RecurrentLayer:
    """One recurrent layer's state of all sequences, by slot.

    The state and the first `window - 1` rows of `inputs` are as before the last pass; the rows of that pass are
    recorded. Whatever runs next first replays `kept` of them, with the routine that ran them.
    """

    state: Tensor  # [slots, value heads, key size, value size] float32
    inputs: Tensor  # [slots, window - 1 + recorded rows, layout.width] float32
    record: Tensor  # [slots, recorded rows, layout.record] float32
    kept: Tensor  # [2, slots] int64 in host memory: rows to replay in the convolution and in the state

    @property
    def rows(self) -> int:
        """The most rows of a pass that are recorded; after wider ones the state is staged."""
        return self.record.shape[1]


@dataclass(slots=True)
class DeviceLayer(RecurrentLayer):
    """One recurrent layer's state on a GPU: as `RecurrentLayer`, with a spare slot at the end.

    record [2, slots + 1, recorded rows, layout.record]; kept [slots + 1] int32 on the device, shared by all layers.
    """

    parity: Tensor  # [slots + 1] int32, shared by all layers: the buffer of `record` that holds the last pass

    @property
    def rows(self) -> int:
        """The most rows of a decode pass."""
        return self.record.shape[2]


@dataclass(slots=True)
class Staged:
    """State after a pass too wide to record; it counts once the pass is committed as a whole."""

    count: int
    state: Tensor  # [layers, value heads, key size, value size] float32
    inputs: Tensor  # [layers, window - 1, layout.width] float32


CHUNK_ROWS = 64  # rows of a prompt that a GPU computes together, and a recurrence cuts at: borders from position 0 on


@dataclass(slots=True)
class RowTables:
    """Whose the rows of a pass on a GPU are, in tensors that captured graphs read: nothing is found by dividing.

    An owner is a line of `PassRows.block_tables`, `PassRows.slot` and `PassRows.first`. Rows that pad a pass belong to
    an owner whose pages are all spare, at position 0, and to no turn or chunk: what comes out of them is of no use.
    Entries of the three tables that are not in use have 0 rows or chunks.
    """

    owner: Tensor  # [rows] int32
    at: Tensor  # [rows] int32: positions
    turns: Tensor  # [turns, 3] int32: first row, rows (up to `WIDEST`) and owner, of rows that are being generated
    chunks: Tensor  # [chunks, 3] int32: first row, rows (up to `CHUNK_ROWS`) and owner, of rows of prompts
    stretches: Tensor  # [stretches, 3] int32: first chunk, chunks and owner: chunks of one prompt in order
    # [rows, 2] int32: first and last position of the picture that a row is part of (1, 0: none). In layers with a
    # window all rows of a picture see each other.
    pictures: Tensor | None = None
    generated: int | None = None  # rows of turns are among the first so many of the pass; None: anywhere in it

    @classmethod
    def of(
        cls,
        turns: Sequence[tuple[int, int, int]],
        prompts: Sequence[tuple[int, int, int]],
        device: torch.device | str,
        rows: int = 0,
        spare: int = 0,
        entries: tuple[int, int, int] = (0, 0, 0),
    ) -> RowTables:
        """Tables for turns, then prompts: owner, position of the first row and number of rows of each.

        With `rows` the pass is padded to so many, which belong to the owner `spare`; `entries` are the fewest turns,
        chunks and stretches that the tables have room for.
        """
        owner: list[int] = []
        at: list[int] = []
        starts: list[list[int]] = []
        chunks: list[list[int]] = []
        stretches: list[list[int]] = []
        for mine, position, count in [*turns, *prompts]:
            starts.append([len(owner), count, mine])
            owner += [mine] * count
            at += range(position, position + count)
        generated = sum(count for _, _, count in turns)
        for (first, count, mine), (_, position, _) in zip(starts[len(turns) :], prompts, strict=True):
            borders = [0, *range(CHUNK_ROWS - position % CHUNK_ROWS, count, CHUNK_ROWS), count]
            stretches.append([len(chunks), len(borders) - 1, mine])
            chunks += [[first + start, stop - start, mine] for start, stop in pairwise(borders)]
        padding = max(0, rows - len(owner))

        def table(lines: list[list[int]], least: int) -> Tensor:
            padded = lines + [[0, 0, spare]] * (least - len(lines))
            return torch.tensor(padded, dtype=torch.int32, device=device).view(-1, 3)

        return cls(
            torch.tensor(owner + [spare] * padding, dtype=torch.int32, device=device),
            torch.tensor(at + [0] * padding, dtype=torch.int32, device=device),
            table(starts[: len(turns)], entries[0]),
            table(chunks, entries[1]),
            table(stretches, entries[2]),
            generated=generated,
        )


@dataclass(slots=True)
class PassRows:
    """Where the rows of a pass belong: those of a sequence follow each other, one sequence after another.

    On a CPU the host knows them: where each sequence's rows begin, and at which position. On a GPU `tables` say it, in
    tensors; then `query_start` and `position` may be of a pass that was captured, and mean nothing.
    """

    query_start: Tensor  # [sequences + 1] int32 in host memory: the first row of each, and the number of rows
    width: int  # rows of the sequence that has most
    position: Tensor  # [sequences] int32: of each sequence's first row
    block_tables: Sequence[Tensor]  # by page group [sequences, pages] int32; entries past what is held name any page
    slot: Tensor  # [sequences] int32, in the recurrent state
    states: Sequence[RecurrentLayer] = ()  # by recurrent layer
    staged: Sequence[Staged | None] = ()  # by sequence: where one with too many rows to record leaves its state
    # [rows] int64: rows of one number, if not -1, see each other in layers with a window, later ones too.
    together: Tensor | None = None
    first: Tensor | None = None  # [sequences] int32: the first key that rows of a sequence may see; None: all may
    longest: int = 0  # tokens of the longest sequence after this pass; on a GPU tables of angles are long enough
    tables: RowTables | None = None  # on a GPU

    @classmethod
    def uniform(
        cls,
        width: int,
        position: Tensor,
        block_tables: Sequence[Tensor],
        slot: Tensor,
        states: Sequence[RecurrentLayer] = (),
    ) -> PassRows:
        """`width` rows of every sequence, as a GPU has them."""
        starts = torch.arange(0, len(position) * width + 1, width, dtype=torch.int32)
        return cls(starts, width, position, block_tables, slot, states)

    def table(self, layer: LayerPages) -> Tensor:
        """The block tables [sequences, pages] of a layer's pages."""
        return self.block_tables[layer.group]

    def stage_of(self, sequence: int) -> Staged | None:
        """Where a sequence with too many rows to record leaves its state."""
        return self.staged[sequence] if self.staged else None

    def spans(self) -> list[tuple[int, int, int]]:
        """Sequence, first row and number of rows, for bodies that take one sequence after another."""
        starts = self.query_start.tolist()
        return [(index, starts[index], starts[index + 1] - starts[index]) for index in range(len(starts) - 1)]


@dataclass(slots=True)
class LayerPages:
    """One layer's keys and values in the page pool."""

    keys: Tensor  # [pages, kv heads, head size, page size]
    values: Tensor  # [pages, kv heads, page size, head size]
    group: int = 0  # of the pool's page groups: which block table names its pages


@dataclass(slots=True)
class Angles:
    """Rotary embedding: cos and sin [positions, rotated / 2] of all positions up to the last of a pass, and more."""

    cos: Tensor
    sin: Tensor
    by_row: bool = False  # one entry for each row of the pass instead: media count positions in a way of their own


@dataclass(slots=True)
class HeadNorms:
    """RMS norms of each head's queries and keys, and of its values in some families: the factors [size] float32."""

    queries: Tensor
    keys: Tensor
    eps: float
    values: Tensor | None = None


@dataclass(slots=True)
class Joined:
    """Rows that are added to others before anything else; both are normed for it."""

    norm: Tensor  # [width] of the rows they are added to, as other_norm
    other: Tensor  # [rows, width]
    other_norm: Tensor


@dataclass(slots=True)
class Decay:
    """How fast the state of each value head fades: α = exp(rate · softplus(input + bias))."""

    rate: Tensor  # [value heads] float32, negative
    bias: Tensor  # [value heads] float32


@dataclass(slots=True)
class Expert:
    """One gated feed-forward network."""

    gate_up: Matrix  # [2 · inner, hidden], gate first
    down: Matrix  # [hidden, inner]


@dataclass(slots=True)
class Stacked:
    """All experts of a layer in two tensors."""

    gate_up: Tensor  # [experts, 2 · inner, hidden], gate first
    down: Tensor  # [experts, hidden, inner]


Experts = list[Expert] | Stacked
Activation = Literal["silu", "gelu_tanh"]
LARGEST_TOP_K = 256  # that a device filters by itself
WIDEST = 16  # rows of one sequence in a decode pass: a token that is known and up to 15 drafts


class Kernels(Protocol):
    """Bodies of all operations for one device and precision, picked once when a model loads.

    A row's bits must not depend on the other rows of a pass, nor on whether it came as part of a prompt. Recurrences
    alone may take the rows of a prompt in another way, in chunks whose borders are multiples of 64 positions.
    """

    name: str
    joins_gates: bool  # the gates of a recurrence are columns of its projection: a launch less where weights are floats

    def matrix(self, weight: Weight, bias: Tensor | None) -> Matrix:
        """Pack weight [out, in] the way `linear` wants it; quantised weights may come as they are stored."""
        ...

    def float_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """As `matrix`, for weights that are never rounded: routers, gates of a recurrence, the input of a head."""
        ...

    def draft_matrix(self, weight: Tensor) -> Matrix:
        """As `matrix`, for rows that only drafts come from: in fewer bits where that is faster."""
        ...

    def embed(self, tokens: Tensor, table: Table) -> Tensor:
        """The rows of table [vocab, hidden] that tokens [rows] name."""
        ...

    def linear(self, x: Tensor, matrix: Matrix) -> Tensor:
        """[rows, in] → [rows, out]."""
        ...

    def add_linear(self, x: Tensor, matrix: Matrix, before: Tensor) -> Tensor:
        """before + linear(x)."""
        ...

    def gated_linear(self, x: Tensor, matrix: Matrix, activation: Activation = "silu") -> Tensor:
        """activation(first half) · second half of linear(x); gelu in the form with tanh."""
        ...

    def logits(self, x: Tensor, matrix: Matrix, cap: float = 0.0) -> Tensor:
        """linear(x) in float32. With a cap they become cap · tanh(logit / cap), in float32 too."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[rows, width] → [rows, width], computed in float32."""
        ...

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        before: Tensor,
        factor: float,
        then: Sequence[Tensor] = (),
        joined: Joined | None = None,
    ) -> tuple[Tensor, ...]:
        """(before + rms_norm(x)) · factor, and the norms of that with the weights `then`, up to three.

        Where something is joined, x is rms_norm(x) + rms_norm(other) first.
        """
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """x + other."""
        ...

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        """Columns of several [rows, …] one after another."""
        ...

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Some columns of [rows, …], as rows that an operation may read."""
        ...

    def pick(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Some rows, by their numbers [n] int64; None: all of them."""
        ...

    def rule_out(self, logits: Tensor, never: Tensor) -> Tensor:
        """Logits of the tokens `never` [n] int64 become −∞, in place."""
        ...

    def gate_linear(self, x: Tensor, matrix: Matrix, own: Tensor) -> Tensor:
        """gelu(linear(x)) · own, in the form with tanh; own [rows, out] may be a slice of columns."""
        ...

    def layer_inputs(
        self, seen: Tensor, scale: float, norm: Tensor, eps: float, tokens: Tensor, table: Table, table_scale: float
    ) -> Tensor:
        """(rms_norm(seen · scale) + table[tokens] · table_scale) / √2, normed in pieces as long as the norm.

        seen [rows, layers · size], table [vocabulary, layers · size], tokens [rows].
        """
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        rows: PassRows,
        layer: LayerPages,
        angles: Angles,
        norms: HeadNorms | None,
    ) -> None:
        """Norms of the heads of queries and keys, their rotary embedding, and all rows' keys and values to their pages.

        In place: what `attention` reads of qkv are the queries. A layout without key heads has queries only: nothing is
        stored.
        """
        ...

    def attention(self, qkv: Tensor, spec: AttentionSpec, rows: PassRows, layer: LayerPages) -> Tensor:
        """[rows, layout.width] → [rows, heads · size]; the pages say how many key heads there are."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor, first: int) -> Tensor:
        """x [rows, width] · sigmoid of columns `first` and following of gate; a gate with one column left is shared."""
        ...

    def recurrence(
        self,
        x: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        rows: PassRows,
        layer: int,
        convolution: Tensor,
        decay: Decay,
    ) -> Tensor:
        """The gated delta rule over the rows of each sequence, in float32: [rows, layout.values].

        The first columns of x become queries, keys and values by silu of a causal convolution per channel, weights
        `convolution` [window, layout.width]; gates [rows, 2 · value heads] are β's inputs, then α's. Then for each
        row S ← αS, S ← S + k·β(v − Sᵀk), out = Sᵀq. Takes part in `PassRows.states`: see `RecurrentLayer`.
        """
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, first: int, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of each head of x [rows, heads · size], times weight, times silu of gate's columns from `first`."""
        ...

    def route(self, logits: Tensor, top: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The `top` largest of each row, in some order, and their softmax: ids [rows, top] int64, weights float32.

        With a scale [experts] float32 the weights are multiplied by those of their experts.
        """
        ...

    def pack_experts(self, experts: list[Expert]) -> Experts:
        """The experts of a layer the way `experts` wants them."""
        ...

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, activation: Activation = "silu"
    ) -> Tensor:
        """Σ weight · expert(row) over the experts of each row, in ascending order of their ids."""
        ...

    def cluster_logits(self, x: Tensor, table: Tensor, clusters: Tensor) -> Tensor:
        """x [rows, in] · table [clusters, size, in] of each row's clusters [rows, top]: float32 [rows, top · size]."""
        ...
