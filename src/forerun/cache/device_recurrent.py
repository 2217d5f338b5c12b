"""Recurrent and convolution state on a GPU: the twin of `StateSlots` for passes that the host does not watch.

As there, a decode pass leaves the state alone and records its rows; the next one first replays those that count. How
many that are is known on the device only, so `kept` lives there, and every pass reads and sets it without the host.
Rows are recorded in two buffers in turn: programs of one launch read the old rows while others write the new ones.
Every decode pass must be committed, if with 0 rows: it has moved the state on by the rows it replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forerun.cache.recurrent import SlotContents, Slots, empty_stage
from forerun.kernels.interface import WIDEST, DeltaLayout, DeviceLayer, RecurrentLayer, Staged


@dataclass(slots=True)
class DeviceContents(SlotContents):
    """`kept` is [2]: kept and parity."""

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

    def stage(self, slot: int, count: int, prefill: bool) -> Staged | None:
        """Where the next `count` rows of a prompt leave their state; None for a decode pass, which is recorded."""
        if not prefill:
            return None
        assert slot not in self._decoded, "a prompt comes before the answer: nothing is left to replay"
        return empty_stage(self.layout, len(self.layers), count, self.device)

    def first_stage(self, count: int) -> tuple[list[RecurrentLayer], Staged]:
        """The state of an empty sequence, and where the first rows of any prompt leave theirs: a graph's own."""
        layout = self.layout
        state = torch.zeros(1, layout.value_heads, layout.key_size, layout.value_size, device=self.device)
        inputs = torch.zeros(1, layout.window - 1, layout.width, device=self.device)
        empty = RecurrentLayer(state, inputs, state[:0], self.kept[:0])
        return [empty] * len(self.layers), empty_stage(layout, len(self.layers), count, self.device)

    def commit(self, slot: int, staged: Staged | None, count: int) -> None:
        """Keep `count` rows of the last pass; after a decode pass as `committed` says of the device."""
        if staged is None:
            assert 0 <= count <= WIDEST
            self.kept[slot].fill_(count)
            self.parity[slot].bitwise_xor_(1)
            self.committed(slot)
        elif count:
            assert count == staged.count, "a prefill pass is committed as a whole"
            self._state[:, slot] = staged.state
            self._inputs[:, slot, : self.layout.window - 1] = staged.inputs

    def committed(self, slot: int) -> None:
        """The device has committed a decode pass by itself: it has set `kept` and flipped `parity`."""
        self._decoded.add(slot)

    def copy(self, slot: int, device: torch.device) -> DeviceContents:
        """The contents of a slot, on `device`."""
        parts = (self._state[:, slot], self._inputs[:, slot], self._record[:, :, slot])
        copies = (part.to(device, copy=True) for part in parts)
        kept = torch.stack([self.kept[slot], self.parity[slot]]).to(device)
        return DeviceContents(list(zip(*copies, strict=True)), kept, slot in self._decoded)

    def put(self, slot: int, contents: SlotContents) -> None:
        """Bring copied contents back."""
        assert isinstance(contents, DeviceContents)
        for layer, (state, inputs, record) in zip(self.layers, contents.layers, strict=True):
            layer.state[slot], layer.inputs[slot], layer.record[:, slot] = state, inputs, record
        self.kept[slot], self.parity[slot] = contents.kept
        (self._decoded.add if contents.decoded else self._decoded.discard)(slot)
