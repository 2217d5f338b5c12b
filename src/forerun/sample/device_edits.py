"""What requests change in their logits, in the tables that the device's edits read: one slot per sequence of a batch.

Needs triton; imported on first use, like `device`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from forerun.kernels.gpu.editing import MASK_BITS, ONCE, EditTables
from forerun.kernels.interface import WIDEST
from forerun.sample.history import TokenHistory
from forerun.sample.parameters import SamplingParams

PLAIN = (0.0, 1.0, 0.0, 0.0)  # no bias, no penalties


class EditBuffers:
    """The edits of up to `most_slots` batch slots. Captured graphs hold the tables: they never move.

    The tables are dense, 14 bytes for each token of the vocabulary and slot (64 slots and 248 320 tokens: 222 MB, of
    which bias 127, history 64, grammar masks 32). Most engines never need them: make them for the first request that
    edits.
    """

    def __init__(self, most_slots: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // MASK_BITS)
        self.vocab, self.device = vocab, device
        self.tables = EditTables(
            settings=torch.tensor([PLAIN] * most_slots, dtype=torch.float64, device=device),
            bias=torch.zeros(most_slots, words * MASK_BITS, dtype=torch.float64, device=device),
            used=torch.zeros(most_slots, words * MASK_BITS, dtype=torch.int32, device=device),
            masked=torch.zeros(most_slots, WIDEST, dtype=torch.int32, device=device),
            masks=torch.zeros(most_slots, WIDEST, words, dtype=torch.int32, device=device),
        )
        self._plain = torch.tensor(PLAIN, dtype=torch.float64, device=device)

    def join(self, slot: int, params: SamplingParams, history: TokenHistory) -> None:
        """Put a sequence into a slot, with the history that the host knows, the pending token included."""
        self.clear(slot)
        if not params.needs_edits:
            return
        named = int(np.searchsorted(params.bias_ids, self.vocab))  # sorted: those below the vocabulary come first
        bias_ids, bias = params.bias_ids[:named], params.bias_values[:named]
        seen, (answer, counts) = history.seen(), history.answer()
        ids = np.concatenate([seen, answer])
        uses = np.concatenate([np.ones_like(seen), counts * ONCE])
        known = (ids >= 0) & (ids < self.vocab)
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        settings = np.array([float(named > 0), *penalties])
        parts = [settings.view(np.int64), ids[known], uses[known], bias_ids, bias.view(np.int64)]
        there = self._upload(np.concatenate(parts)).split([len(part) for part in parts])
        tables = self.tables
        if params.penalised:
            tables.used[slot].zero_().scatter_add_(0, there[1], there[2].int())  # 1 for being seen + 2 per use
        if named:
            tables.bias[slot].zero_().scatter_(0, there[3], there[4].view(torch.float64))
        tables.settings[slot].copy_(there[0].view(torch.float64))

    def clear(self, slot: int) -> None:
        """Logits of the slot are used as they are."""
        self.tables.settings[slot].copy_(self._plain)
        self.tables.masked[slot].zero_()

    def mask(self, slot: int, allowed: npt.NDArray[np.int32]) -> None:
        """Grammar masks of a slot's first rows in the next round, as words of 32 tokens [rows, ⌈vocab / 32⌉]."""
        rows = len(allowed)
        self.tables.masks[slot, :rows].copy_(self._upload(allowed))
        self.tables.masked[slot, :rows].fill_(1)
        self.tables.masked[slot, rows:].zero_()

    def _upload(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        """In one copy that does not wait for the device."""
        here = torch.from_numpy(values)
        return here.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else here
