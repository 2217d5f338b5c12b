"""The `assistant` drafter: a small model that reads the target's own keys and values, and keeps none itself.

All it needs of a sequence is its last token, the target's hidden state at the position before, and the target's pages.
Nothing is left of a draft once it is made, so there is nothing to roll back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.cache.pages import PagePool, SequenceCache
from forerun.draft.arms import ASSISTANT
from forerun.draft.assistant_device import AssistantDeviceHalf
from forerun.draft.drawing import Drawing
from forerun.draft.protocol import Capture, Draft, Drafter, SlotTensors, Want, draft_for_some
from forerun.kernels.interface import PassRows
from forerun.models.layers.assistant import Assistant
from forerun.models.layers.media import PromptMedia
from forerun.models.layers.rows import Pass, last_rows


@dataclass(slots=True)
class State:
    """One sequence as the assistant sees it."""

    count: int  # tokens, the pending one included
    pending: int
    fed: int = 0  # positions whose hidden states have come
    hidden: Tensor | None = None  # [hidden], the last of them

    @property
    def known(self) -> bool:
        """Is the hidden state that of the last committed position?"""
        return self.hidden is not None and self.fed == self.count - 1


class AssistantDrafter(Drafter):
    """Drafts for all sequences together: one pass per depth. `pool` is the target's."""

    name = ASSISTANT.name
    wants_features = True

    def __init__(self, assistant: Assistant, pool: PagePool, vocab: int) -> None:
        self.assistant, self.pool, self.vocab = assistant, pool, min(vocab, assistant.vocab)
        self._states: dict[int, State] = {}

    def open(self, sequence_id: int, tokens: list[int], media: PromptMedia | None = None) -> None:  # noqa: ARG002
        self._states[sequence_id] = State(len(tokens), tokens[-1])

    def observe(self, sequence_id: int, tokens: list[int]) -> None:
        state = self._states[sequence_id]
        state.count += len(tokens)
        state.pending = tokens[-1]

    def feed(self, sequence_id: int, features: Tensor) -> None:
        """Of all hidden states the last one counts."""
        state = self._states[sequence_id]
        state.fed += len(features)
        if len(features):
            state.hidden = features[-1, -self.assistant.hidden :].clone()

    def ready(self, sequence_id: int) -> int:
        return sequence_id in self._states

    def device_half(self, slots: SlotTensors, capture: Capture) -> AssistantDeviceHalf:  # noqa: ARG002
        """See `draft/assistant_device.py`."""
        return AssistantDeviceHalf(self, slots)

    def leave(self, sequence_id: int, length: int) -> None:
        """A device hands a sequence back with `length` tokens in its cache: one round has no draft."""
        state = self._states[sequence_id]
        state.fed, state.hidden = length, None

    def close(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    def propose(self, wants: list[Want]) -> list[Draft]:
        """Whoever has just come back from a device has no hidden state to go on from, and no draft."""
        return draft_for_some(wants, [self._states[want.sequence_id].known for want in wants], self._draft)

    def _draft(self, wants: list[Want]) -> list[Draft]:
        states, caches = [self._states[want.sequence_id] for want in wants], [the_cache(want) for want in wants]
        drawing = Drawing(wants, self.vocab, deterministic=True)
        outputs = [state.hidden for state in states]  # of the target, then of the assistant
        rows: PassRows | None = None
        before: list[int] = []
        for depth in range(max(want.depth for want in wants)):
            live = drawing.live(depth)
            if not live:
                break
            if live != before:
                rows, before = last_rows([caches[index] for index in live], self.assistant.ahead), live
            assert rows is not None
            tokens = [(drawing.tokens[index] or [states[index].pending])[-1] for index in live]
            hidden = torch.stack([row for index in live if (row := outputs[index]) is not None])
            batch = Pass(torch.tensor(tokens, device=hidden.device), rows, self.pool.layers, None, False)
            found = self.assistant.forward(hidden, batch)
            drawing.draw(live, self.assistant.logits(found))
            for index, row in zip(live, self.assistant.project(found), strict=True):
                outputs[index] = row
        return drawing.drafts()


def the_cache(want: Want) -> SequenceCache:
    """Of the target."""
    assert want.cache is not None
    return want.cache
