"""The device half of the `mtp` drafter: inside captured rounds the head follows the batch slots and drafts for them.

A round that wants drafts lets the head read all its rows; rejected ones are overwritten later. A plain round that wants
none only puts its features into a ring, and many are read at once when drafts are wanted again: plain decoding does not
pay for a head that follows along. A position's keys and values depend on nothing but its own features and token, so
filled in late they are what they would have been.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.draft.arms import MTP
from forerun.draft.drawing import draw_on_device
from forerun.draft.protocol import Capture, DeviceHalf, FollowShape, SlotTensors
from forerun.kernels.interface import PassRows
from forerun.kernels.packed import Packed
from forerun.models.layers.rows import Pass

if TYPE_CHECKING:
    from forerun.draft.mtp import MtpDrafter

RING = 16  # rounds whose features are kept; a power of two


class MtpDeviceHalf(DeviceHalf):
    """Of all batch slots; `behind_most` is how many positions any of them has yet to be read."""

    name = MTP.name

    def __init__(self, drafter: MtpDrafter, slots: SlotTensors, capture: Capture) -> None:
        self.drafter, self.head, self.pool = drafter, drafter.head, drafter.pool
        self.slots, self._capture = slots, capture
        head, most, device = drafter.head, len(slots.position), slots.position.device
        size = head.embedding.shape[1] if head.fuse_matrix is None else head.fuse_matrix.shape[1]
        small = torch.int32
        self._asked = Packed(device, {"table": (small, (most, slots.most_pages)), "live": (small, (most,))})
        self.table, self.live = self._asked.there["table"], self._asked.there["live"]  # live: the head drafts for it
        self._asked.here["table"].fill(drafter.pool.spare_page)
        self._asked.send()
        self.features = torch.zeros(most, RING, size, dtype=drafter.pool.layers[0].keys.dtype, device=device)
        self.tokens = torch.zeros(most, RING, dtype=torch.int64, device=device)
        self.behind = torch.zeros(most, dtype=torch.int32, device=device)  # positions before `slots.position`
        self.behind_most = 0
        self._in_use = 1  # slots of the rounds that were launched last
        self._joined: dict[int, int] = {}  # batch slot → sequence
        self._reads: dict[tuple[int, int], Callable[[], Tensor]] = {}  # by slots and positions

    def follows(self, slot: int) -> bool:
        """Does it draft for this slot?"""
        return slot in self._joined

    def join(self, slot: int, sequence_id: int, tokens: int) -> bool:
        """Take a sequence over from the host half."""
        joined = self.drafter.join(sequence_id, tokens)
        if joined is None:
            return False
        pages, waiting = joined
        self._joined[slot] = sequence_id
        self._turn_pages(slot, pages, live=1)
        count = 0
        if waiting is not None:
            count = len(waiting.tokens)
            assert count <= RING
            ids = torch.tensor(waiting.tokens).to(self.tokens.device, non_blocking=True)
            first = waiting.start % RING
            before = min(count, RING - first)  # the end of the ring
            for into, source in ((self.features[slot], waiting.features), (self.tokens[slot], ids)):
                into[first : first + before] = source[:before]
                into[: count - before] = source[before:]
        self.behind[slot : slot + 1].fill_(count)
        self.behind_most = max(self.behind_most, count)
        return True

    def grow(self, slot: int, tokens: int) -> bool:
        """More pages for a sequence that sits here."""
        pages = self.drafter.grow(self._joined[slot], tokens)
        if pages is not None:
            self._turn_pages(slot, pages, live=1)
        return pages is not None

    def leave(self, slot: int, length: int | None) -> None:
        """Read what was put by, then hand the sequence back; one that is over is only forgotten."""
        sequence_id = self._joined[slot]
        if length is not None and self.drafter.is_open(sequence_id):
            self.catch_up(max(self._in_use, slot + 1))
            self.drafter.leave(sequence_id, length)
        self._turn_pages(slot, [], live=0)
        del self._joined[slot]

    def _turn_pages(self, slot: int, pages: list[int], live: int) -> None:
        row = self._asked.here["table"][slot]
        row[: len(pages)] = pages
        row[len(pages) :] = self.pool.spare_page
        self._asked.here["live"][slot] = live
        self._asked.send()

    def before_round(self, shape: FollowShape, captured: bool) -> None:
        """Whoever reads the rows of a round must have read those before; so must a ring that is full."""
        if not shape.only_follows or self.behind_most >= RING or not captured:
            self.catch_up(shape.slots)

    def may_repeat(self, shape: FollowShape) -> bool:
        """Not where a graph must be captured for reading."""
        return not shape.only_follows or self.behind_most < RING or (shape.slots, RING) in self._reads

    def launched(self, shape: FollowShape) -> None:
        """Count what was put by."""
        self._in_use = shape.slots
        self.behind_most += shape.only_follows

    def catch_up(self, count: int) -> None:
        """Let the head of the first `count` slots read all that was put by."""
        for slot, sequence_id in self._joined.items() if self.behind_most else ():
            if not self.drafter.is_open(sequence_id):  # its pages may be another's by now
                self._turn_pages(slot, [], live=0)
        positions = RING
        while self.behind_most:
            while positions > self.behind_most:
                positions //= 2
            self._reading(count, positions)()
            self.behind_most -= positions

    def idle_values(self) -> list[tuple[Tensor, int]]:
        """Pages where nothing is kept, nobody to draft for, nothing put by."""
        return [(self.table, self.pool.spare_page), (self.live, 0), (self.behind, 0)]

    def prepare(self, slots: int) -> None:
        """Capture every reading that rounds of so many slots may want."""
        for power in range(RING.bit_length()):
            self._reading(slots, 1 << power)

    def _reading(self, count: int, positions: int) -> Callable[[], Tensor]:
        key = (count, positions)
        if key not in self._reads:
            behind = self.behind.clone()  # that a capture runs once does not count
            self._reads[key] = self._capture(lambda: self._read(*key))
            self.behind.copy_(behind)
        return self._reads[key]

    def _read(self, count: int, positions: int) -> Tensor:
        """The first `positions` that wait. Where fewer do, later ones are filled with what nobody will look at."""
        slots, behind = self.slots, self.behind[:count]
        start = (slots.position[:count] - behind).clamp_(min=0)  # of idle slots it may be anything
        row = (start[:, None] + torch.arange(positions, device=start.device)) % RING  # [slots, positions]
        slot = torch.arange(count, device=start.device)[:, None]
        features, tokens = self.features[slot, row], self.tokens[slot, row].flatten()
        batch = self._rows(tokens, positions, start, count)
        self.head.fill(self.head.fuse(features.flatten(0, 1)), batch)
        return behind.sub_(positions).clamp_(min=0)

    def _rows(self, tokens: Tensor, width: int, start: Tensor, count: int) -> Pass:
        rows = PassRows.uniform(width, start, [self.table[:count]], self.slots.recurrent[:count])
        return Pass(tokens, rows, self.pool.layers, None, False)

    def after_pass(
        self, shape: FollowShape, features: Tensor, chosen: Tensor, before: Tensor, accepted: Tensor
    ) -> None:
        """Put the features by, or read all rows of the round and draft for the next one."""
        if shape.only_follows:
            from forerun.kernels.gpu.feature_ring import keep

            into = self.features, self.tokens, self.behind, self.slots.drafted
            keep(features, chosen.flatten(), before, accepted, *into)
            return
        count, width, head = shape.slots, shape.width, self.head
        batch = self._rows(chosen.flatten(), width, before, count)
        fused = head.fuse(features)
        if not shape.drafts:
            head.fill(fused, batch)
            self.slots.drafted[:count].zero_()
            return
        outputs = head.forward(fused, batch)
        every = torch.arange(count, device=outputs.device)
        self._draft(shape, outputs.view(count, width, -1)[every, accepted.long()])

    def _draft(self, shape: FollowShape, last: Tensor) -> None:
        """`last` [slots, hidden]: the head's output at the last accepted row of each slot."""
        slots, head, count = self.slots, self.head, shape.slots
        position, vocab = slots.position[:count], min(self.drafter.vocab, head.output.shape[0])
        places = position.long()
        for step in range(shape.drafts):
            if step:
                batch = self._rows(slots.drafts[step - 1, :count], 1, position + (step - 1), count)
                last = head.forward(last, batch)
            draw_on_device(slots, shape, step, head.logits(last), places + (1 + step), vocab, head.vocabulary)
        torch.mul(self.live[:count], shape.drafts, out=slots.drafted[:count])
