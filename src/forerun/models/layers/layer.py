"""One layer of a decoder or of a draft head: norms, a mixer between rows, a network for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.feed_forward import FeedForward
from forerun.models.layers.mixers import AllAngles, AttentionMixer, Mixer
from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class Layer:
    """Both parts see normed rows and add to the rows themselves."""

    input_norm: Tensor  # [hidden]
    mixer: Mixer
    post_norm: Tensor  # [hidden]
    feed_forward: FeedForward
    eps: float
    mixed_norm: Tensor | None = None  # [hidden], of what the mixer gives, before it is added
    fed_norm: Tensor | None = None  # [hidden], of what the network gives

    def forward(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> Tensor:
        """[rows, hidden] → [rows, hidden]; pages and states of the sequences take part."""
        normed = kernels.rms_norm(x, self.input_norm, self.eps)
        if self.mixed_norm is None:
            x = self.mixer.forward(kernels, normed, x, batch, angles)
        else:
            x = x + kernels.rms_norm(
                self.mixer.forward(kernels, normed, None, batch, angles), self.mixed_norm, self.eps
            )
        normed = kernels.rms_norm(x, self.post_norm, self.eps)
        if self.fed_norm is None:
            return self.feed_forward.forward(kernels, normed, x, batch.prefill)
        fed = self.feed_forward.forward(kernels, normed, None, batch.prefill)
        return x + kernels.rms_norm(fed, self.fed_norm, self.eps)

    def fill(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> None:
        """Only what later rows read of these: their keys and values."""
        assert isinstance(self.mixer, AttentionMixer)
        self.mixer.fill(kernels, kernels.rms_norm(x, self.input_norm, self.eps), batch, angles)

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from self.mixer.matrices()
        yield from self.feed_forward.matrices()
