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
    """Both parts see normed rows and add to the rows themselves; what they add may be normed too."""

    mixer: Mixer
    feed_forward: FeedForward
    eps: float
    input_norm: Tensor  # [hidden], as all norms here
    pre_feed_forward_norm: Tensor
    post_mixer_norm: Tensor | None = None
    post_feed_forward_norm: Tensor | None = None

    def forward(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> Tensor:
        """[rows, hidden] → [rows, hidden]; pages and states of the sequences take part."""
        normed = kernels.rms_norm(x, self.input_norm, self.eps)
        if self.post_mixer_norm is None:
            x = self.mixer.forward(kernels, normed, x, batch, angles)
        else:
            mixed = self.mixer.forward(kernels, normed, None, batch, angles)
            x = x + kernels.rms_norm(mixed, self.post_mixer_norm, self.eps)
        normed = kernels.rms_norm(x, self.pre_feed_forward_norm, self.eps)
        if self.post_feed_forward_norm is None:
            return self.feed_forward.forward(kernels, normed, x, batch.prefill)
        fed = self.feed_forward.forward(kernels, normed, None, batch.prefill)
        return x + kernels.rms_norm(fed, self.post_feed_forward_norm, self.eps)

    def fill(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> None:
        """Only what later rows read of these: their keys and values."""
        assert isinstance(self.mixer, AttentionMixer)
        self.mixer.fill(kernels, kernels.rms_norm(x, self.input_norm, self.eps), batch, angles)

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from self.mixer.matrices()
        yield from self.feed_forward.matrices()
