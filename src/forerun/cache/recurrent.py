"""Recurrent and convolution state: a slot per sequence, rolled back to any row of the last pass by replaying rows.

A state cannot be truncated like keys and values. So a pass leaves it alone: the rows of the pass are recorded (a few
vectors each, where a state is a matrix per head), `commit(n)` notes that n of them count, and the next pass replays
those before its own rows, in one go over the state and with the routine that ran them. A pass wider than the record,
such as a prefill chunk, leaves the state after its last row aside instead, and is committed whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.interface import WIDEST, DeltaLayout, RecurrentLayer, Staged


@dataclass(slots=True)
class SlotContents:
    """A copy of one slot, bits unchanged."""

    layers: list[tuple[Tensor, Tensor, Tensor]]  # state, inputs and record of each
    kept: Tensor


class Slots:
    """Who holds which slot."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    @property
    def unowned(self) -> list[int]:
        """The numbers of free slots."""
        return list(self._free)

    def recount(self, held: list[int]) -> None:
        """These are held, all others are free."""
        for slot in set(range(self.count)) - {*held, *self._free}:
            self.give_back(slot)

    def take(self) -> int:
        """Hand out a slot."""
        assert self._free, "the scheduler starts a sequence only when a slot is free"
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)


class StateSlots(Slots):
    """The state of all sequences, for all recurrent layers. Memory is touched only when a slot is handed out."""

    def __init__(self, layout: DeltaLayout, layers: int, slots: int, device: torch.device) -> None:
        super().__init__(slots)
        self.layout, self.device = layout, device
        self._kept = torch.zeros(layers, 2, slots, dtype=torch.long)
        past = layout.window - 1
        self.layers = [
            RecurrentLayer(
                torch.empty(slots, layout.value_heads, layout.key_size, layout.value_size, device=device),
                torch.empty(slots, past + WIDEST, layout.width, device=device),
                torch.empty(slots, WIDEST, layout.record, device=device),
                self._kept[layer],
            )
            for layer in range(layers)
        ]

    @staticmethod
    def bytes_per_slot(layout: DeltaLayout, layers: int) -> int:
        """Memory one sequence needs."""
        state = layout.values * layout.key_size
        inputs = (layout.window - 1 + WIDEST) * layout.width
        return 4 * layers * (state + inputs + WIDEST * layout.record)

    def take(self) -> int:
        """Hand out a slot with the state of an empty sequence."""
        slot = super().take()
        for layer in self.layers:
            for part in (layer.state, layer.inputs, layer.record):
                part[slot] = 0
        self._kept[:, :, slot] = 0
        return slot

    def stage(self, slot: int, count: int, prompt: bool) -> Staged | None:  # noqa: ARG002 - what a device asks for
        """Where the next `count` rows of a sequence leave their state; None when they are recorded."""
        if count <= WIDEST:
            return None
        return empty_stage(self.layout, len(self.layers), count, self.device)

    def commit(self, slot: int, staged: Staged | None, count: int) -> None:
        """Keep `count` rows of the last pass."""
        if staged is None:
            # Rows that an interrupted pass left in some layers count for nothing: this one has replaced them.
            self._kept[:, :, slot] = count
        elif count:
            assert count == staged.count, "a pass this wide is committed as a whole"
            for layer, matrix, inputs in zip(self.layers, staged.state, staged.inputs, strict=True):
                layer.state[slot] = matrix
                layer.inputs[slot, : len(inputs)] = inputs

    def copy(self, slot: int, device: torch.device, kept: int | None = None) -> SlotContents:
        """The contents of a slot, on `device`; with `kept`, as if so many rows of the last pass had been kept."""
        layers = [(layer.state, layer.inputs, layer.record) for layer in self.layers]
        return SlotContents(
            [
                (a[slot].to(device, copy=True), b[slot].to(device, copy=True), c[slot].to(device, copy=True))
                for a, b, c in layers
            ],
            self._kept[:, :, slot].clone() if kept is None else torch.full_like(self._kept[:, :, slot], kept),
        )

    def put(self, slot: int, contents: SlotContents) -> None:
        """Bring copied contents back."""
        for layer, (state, inputs, record) in zip(self.layers, contents.layers, strict=True):
            layer.state[slot], layer.inputs[slot], layer.record[slot] = state, inputs, record
        self._kept[:, :, slot] = contents.kept


def empty_stage(layout: DeltaLayout, layers: int, count: int, device: torch.device) -> Staged:
    """Room for the state after `count` rows."""
    state = torch.empty(layers, layout.value_heads, layout.key_size, layout.value_size, device=device)
    return Staged(count, state, torch.empty(layers, layout.window - 1, layout.width, device=device))
