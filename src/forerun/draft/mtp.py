"""The `mtp` drafter: a head of one block that reads the target's hidden states; its entries lie in the target's pages.

While drafting, the head writes entries made from its own outputs; `follow` writes them again, from what the target
computed, once the drafts have been checked. Rejected ones lie behind the end of the text, where nothing reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.protocol import RowDrafter
from forerun.kernels.interface import AttentionSpec
from forerun.kernels.matrix import Matrix
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rows import Pass

if TYPE_CHECKING:
    from forerun.models.recorded import RecordedHead

LATE = 32  # entries that a head which joins late has before it drafts: with fewer it is seldom right


class MtpDrafter(RowDrafter):
    """Its first entry belongs to the second token: there are no features before the first."""

    name = "mtp"
    first = 1
    warm = LATE

    def __init__(self, head: MtpHead, vocab: int) -> None:
        self.head, self.vocabulary = head, head.vocabulary
        self.specs = [AttentionSpec(head.layout)]
        self.features = len(head.hidden_norm) * (len(head.taps) + 1)
        self.vocab = vocab if head.vocabulary is not None else min(vocab, head.output.shape[0])

    @property
    def weight_bytes(self) -> int:
        return self.head.weight_bytes

    def attach(self, pool: PagePool) -> None:
        self._pool, self._layers = pool, pool.parts[self.name]
        self._passes = self._written()

    def target_changed(self, target: Decoder, output: Matrix) -> None:
        """Its target has new weights: what the head shares with it. `output`: the matrix that the target had."""
        head = self.head
        head.embedding = target.embedding
        if head.output is output:
            head.output = target.head
        elif head.vocabulary is not None:
            head.output = head.kernels.draft_matrix(target.output_rows(head.vocabulary).to(target.dtype))
        self._passes = self._written()  # recordings know where weights are

    def follow(self, batch: Pass, features: Tensor | None) -> None:
        assert features is not None
        self._passes.fill(self._passes.fuse(features), self._own(batch))

    def begin(self, features: Tensor | None) -> Tensor:
        assert features is not None
        return self._passes.fuse(features)

    def step(self, number: int, hidden: Tensor | None, batch: Pass) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        assert hidden is not None
        return self._passes.draft(hidden, self._own(batch))

    def _own(self, batch: Pass) -> Pass:
        """The same rows in its own layer; recurrent state is none of its business."""
        return replace(batch, pages=self._layers, wanted=None, features=False)

    def _written(self) -> MtpHead | RecordedHead:
        """What runs the head: on a CPU recordings, elsewhere the head itself."""
        if self._pool.on_device or self._pool.device.type != "cpu":
            return self.head
        from forerun.models.recorded import head_of  # needs llvmlite, which a machine with a GPU may lack

        return head_of(self.head, self._layers, len(self._pool.groups))
