"""The `model` drafter: a smaller model with the same tokenizer runs along; its entries lie in the target's pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.cache.pages import PagePool
from forerun.draft.protocol import RowDrafter
from forerun.errors import ForerunError
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.rows import Pass, Target


class ModelDrafter(RowDrafter):
    """An entry depends on all before it: it follows a text from the first token on, or catches up."""

    name = "model"
    warm = None

    def __init__(self, model: Decoder, vocab: int) -> None:
        if model.config.delta is not None:
            raise ForerunError(
                f"a {model.config.family} model cannot draft: its recurrent state does not go back to earlier tokens; "
                "use its own MTP head (--draft mtp) or another draft model"
            )
        self.model, self.vocab = model, min(vocab, model.config.vocab)
        self.specs, self.longest = list(model.config.attention), model.config.context

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def attach(self, pool: PagePool) -> None:
        self._layers = pool.parts[self.name]
        self._target: Target = self.model
        if not pool.on_device and pool.device.type == "cpu":
            from forerun.models.recorded import target_of  # needs llvmlite, which a machine with a GPU may lack

            self._target = target_of(self.model, self._layers, len(pool.groups))

    def follow(self, batch: Pass, features: Tensor | None) -> None:  # noqa: ARG002
        one = torch.zeros(
            1, dtype=torch.int64, device=batch.tokens.device
        )  # logits of one row are the fewest there are
        self._target.forward(self._own(batch, one))

    def begin(self, features: Tensor | None) -> None:  # noqa: ARG002
        return None

    def step(self, number: int, hidden: Tensor | None, batch: Pass) -> tuple[None, Tensor]:  # noqa: ARG002
        return None, self._target.forward(self._own(batch, batch.wanted)).logits

    def _own(self, batch: Pass, wanted: Tensor | None) -> Pass:
        """The same rows in its own layers. It reads no media; a token that it lacks is another one to it."""
        tokens = batch.tokens.clamp(max=self.model.config.vocab - 1)
        rows = replace(batch.rows, states=(), staged=(), together=None)
        return replace(batch, tokens=tokens, rows=rows, pages=self._layers, wanted=wanted, features=False, media=None)
