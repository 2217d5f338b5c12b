"""Recurrent and convolution state on a GPU: the twin of `StateSlots` for passes that the host does not watch.

As there, generated rows leave the state alone and are recorded; the next pass first replays those that count. How many
that are is known on the device only, so `kept` lives there, and every pass reads and sets it without the host. Rows are
recorded in two buffers in turn: programs of one launch read the old rows while others write the new ones. Every pass
with generated rows must be committed, if with 0 rows: it has moved the state on by the rows it replayed.

Rows of prompts move the state on at once. All of them count, and nothing of them is left to replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.cache.recurrent import SlotContents, Slots
from forerun.kernels.interface import WIDEST, DeltaLayout, DeviceLayer, Staged


@dataclass(slots=True)
class DeviceContents(SlotContents):
    """All layers in one piece, recorded rows only where some may be replayed. `kept` is [2]: kept and parity."""

    decoded: bool


class DeviceStates(Slots):
    """The state of all sequences, for all recurrent layers; slot number `count` is spare, for batch slots that idle."""

    def __init__(self, layout: DeltaLayout, layers: int, slots: int, device: torch.device) -> None:
        super().__init__(slots)
        self.layout, self.device = layout, device
        every = slots + 1
        heads = layout.value_heads, layout.key_size, layout.value_size
        # Each in one piece, so that a slot of all layers is one copy.
        self._state = torch.zeros(layers, every, *heads, device=device)
        self._inputs = torch.zeros(layers, every, layout.window - 1 + WIDEST, layout.width, device=device)
        self._record = torch.zeros(layers, 2, every, WIDEST, layout.record, device=device)
        self.kept = torch.zeros(every, dtype=torch.int32, device=device)
        self.parity = torch.zeros(every, dtype=torch.int32, device=device)
        self.layers = [
            DeviceLayer(state, inputs, record, self.kept, self.parity)
            for state, inputs, record in zip(self._state, self._inputs, self._record, strict=True)
        ]
        self._decoded: set[int] = set()  # slots that may have rows to replay
        self._prompts: set[int] = set()  # slots whose last pass had rows of a prompt

    @staticmethod
    def bytes_per_slot(layout: DeltaLayout, layers: int) -> int:
        """Memory one sequence needs; the spare slot needs as much."""
        state = layout.values * layout.key_size
        inputs = (layout.window - 1 + WIDEST) * layout.width
        return 4 * layers * (state + inputs + 2 * WIDEST * layout.record)

    def take(self) -> int:
        """Hand out a slot with the state of an empty sequence."""
        slot = super().take()
        for part in (self._state[:, slot], self._inputs[:, slot], self.kept[slot], self.parity[slot]):
            part.zero_()
        return slot

    def give_back(self, slot: int) -> None:
        """Take a slot back."""
        super().give_back(slot)
        self._decoded.discard(slot)
        self._prompts.discard(slot)

    def stage(self, slot: int, count: int, prompt: bool) -> None:  # noqa: ARG002 - what `StateSlots` asks for
        """The next pass has rows of this slot. They leave nothing aside."""
        assert not prompt or slot not in self._decoded, "a prompt comes before the answer: nothing is left to replay"
        (self._prompts.add if prompt else self._prompts.discard)(slot)

    def commit(self, slot: int, staged: Staged | None, count: int) -> None:
        """Keep `count` generated rows of the last pass; rows of a prompt are kept already."""
        assert staged is None and count >= 0
        if slot not in self._prompts:
            assert count <= WIDEST
            self.kept[slot].fill_(count)
            self.parity[slot].bitwise_xor_(1)
            self.committed(slot)

    def committed(self, slot: int) -> None:
        """The device has committed generated rows by itself: it has set `kept` and flipped `parity`."""
        self._decoded.add(slot)

    def copy(self, slot: int, device: torch.device, kept: int | None = None) -> DeviceContents:
        """The contents of a slot between two passes, on `device`."""
        assert kept is None, "what a device has kept it alone knows"
        decoded = slot in self._decoded
        recorded = WIDEST if decoded else 0
        inputs = self._inputs[:, slot, : self.layout.window - 1 + recorded]
        parts = self._state[:, slot], inputs, self._record[:, :, slot, :recorded]
        state, inputs, record = (part.to(device, copy=True) for part in parts)
        both = torch.stack([self.kept[slot], self.parity[slot]]).to(device)
        return DeviceContents([(state, inputs, record)], both, decoded)

    def put(self, slot: int, contents: SlotContents) -> None:
        """Bring copied contents back."""
        assert isinstance(contents, DeviceContents)
        ((state, inputs, record),) = contents.layers
        self._state[:, slot] = state
        self._inputs[:, slot, : inputs.shape[1]] = inputs
        self._record[:, :, slot, : record.shape[2]] = record
        self.kept[slot], self.parity[slot] = contents.kept
        (self._decoded.add if contents.decoded else self._decoded.discard)(slot)
