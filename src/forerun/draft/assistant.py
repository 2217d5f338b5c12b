"""The `assistant` drafter: a small model that reads the target's own keys and values, and keeps none itself.

All it needs of a sequence is its last token, the target's hidden state at the position before, and the target's pages.
Nothing is left of a draft once it is made, so there is nothing to follow and nothing to roll back.
"""

from __future__ import annotations

from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.arms import ASSISTANT
from forerun.draft.protocol import RowDrafter
from forerun.models.layers.assistant import Assistant
from forerun.models.layers.rows import Pass


class AssistantDrafter(RowDrafter):
    """Every step stands at the last committed position, which decides what is seen."""

    name = ASSISTANT.name
    deterministic = True

    def __init__(self, assistant: Assistant, vocab: int) -> None:
        self.assistant, self.vocab, self.features = assistant, min(vocab, assistant.vocab), assistant.hidden

    @property
    def weight_bytes(self) -> int:
        return self.assistant.weight_bytes

    def attach(self, pool: PagePool) -> None:
        """It reads the target's pages, which every pass names."""

    def follow(self, batch: Pass, features: Tensor | None) -> None:
        """It keeps nothing."""

    def begin(self, features: Tensor | None) -> Tensor:
        assert features is not None
        return features[:, -self.assistant.hidden :].contiguous()

    def place(self, step: int) -> int:  # noqa: ARG002
        return -1

    def step(self, number: int, hidden: Tensor | None, batch: Pass) -> tuple[Tensor, Tensor]:
        assert hidden is not None
        found = self.assistant.forward(self.assistant.project(hidden) if number else hidden, batch)
        return found, self.assistant.logits(found)
