"""The device half of the `assistant` drafter: inside captured rounds it drafts from what the pass has just given.

The target's block tables and positions are in the batch slots already, and an assistant keeps nothing between rounds,
so there is nothing to hand over when a sequence joins or leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.draft.arms import ASSISTANT
from forerun.draft.drawing import draw_on_device
from forerun.draft.protocol import DeviceHalf, FollowShape, SlotTensors
from forerun.kernels.interface import PassRows
from forerun.kernels.packed import Packed
from forerun.models.layers.rows import Pass

if TYPE_CHECKING:
    from forerun.draft.assistant import AssistantDrafter


class AssistantDeviceHalf(DeviceHalf):
    """Of all batch slots."""

    name = ASSISTANT.name

    def __init__(self, drafter: AssistantDrafter, slots: SlotTensors) -> None:
        self.drafter, self.slots = drafter, slots
        self._asked = Packed(slots.position.device, {"live": (torch.int32, (len(slots.position),))})
        self.live = self._asked.there["live"]  # it drafts for these
        self._joined: dict[int, int] = {}  # batch slot → sequence

    def follows(self, slot: int) -> bool:
        """Does it draft for this slot?"""
        return slot in self._joined

    def join(self, slot: int, sequence_id: int, tokens: int) -> bool:  # noqa: ARG002
        """Its drafts begin after the first round."""
        self._joined[slot] = sequence_id
        self._turn(slot, live=1)
        return True

    def leave(self, slot: int, length: int | None) -> None:
        """The host half goes on at `length`; a sequence that is over is only forgotten."""
        sequence_id = self._joined[slot]
        if length is not None:
            self.drafter.leave(sequence_id, length)
        self._turn(slot, live=0)
        del self._joined[slot]

    def _turn(self, slot: int, live: int) -> None:
        self._asked.here["live"][slot] = live
        self._asked.send()

    def idle_values(self) -> list[tuple[Tensor, int]]:
        """Nobody to draft for."""
        return [(self.live, 0)]

    def after_pass(
        self,
        shape: FollowShape,
        features: Tensor,
        chosen: Tensor,  # noqa: ARG002
        before: Tensor,  # noqa: ARG002
        accepted: Tensor,
    ) -> None:
        """Draft for the next round from the hidden state of the last accepted row of each slot."""
        count = shape.slots
        if not shape.drafts:
            self.slots.drafted[:count].zero_()
            return
        every = torch.arange(count, device=features.device)
        rows = features.view(count, shape.width, -1)[..., -self.drafter.assistant.hidden :]
        self._draft(shape, rows[every, accepted.long().clamp(min=0)])

    def _draft(self, shape: FollowShape, hidden: Tensor) -> None:
        """`hidden` [slots, hidden]: of the last committed position of each slot."""
        slots, assistant, count, vocab = self.slots, self.drafter.assistant, shape.slots, self.drafter.vocab
        last = (slots.position[:count] - 1).clamp_(min=0)  # of idle slots it may be anything
        rows = PassRows.uniform(1, last, [table[:count] for table in slots.tables], slots.recurrent[:count])
        places, tokens = slots.position[:count].long(), slots.pending[:count]
        for step in range(shape.drafts):
            found = assistant.forward(hidden, Pass(tokens, rows, self.drafter.pool.layers, None, False))
            tokens = draw_on_device(slots, shape, step, assistant.logits(found), places + (1 + step), vocab)
            if step + 1 < shape.drafts:
                hidden = assistant.project(found)
        torch.mul(self.live[:count], shape.drafts, out=slots.drafted[:count])
