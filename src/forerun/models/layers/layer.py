"""One layer of a decoder or of a draft head: norms, a mixer between rows, a network for each row, what Gemma adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix, Table
from forerun.models.layers.feed_forward import Beside, FeedForward, Mixture, Sparse, expert_matrices
from forerun.models.layers.mixers import AllAngles, AttentionMixer, Mixer
from forerun.models.layers.rows import Pass


@dataclass(slots=True)
class PerLayerInputs:
    """Every layer gets a small input of its own, from the token and from its embedding: the weights of all of them."""

    table: Table  # [vocabulary, layers · size], by token
    table_scale: float
    project: Matrix  # [layers · size, hidden], from the embedding
    norm: Tensor  # [size]
    eps: float

    def forward(self, kernels: Kernels, tokens: Tensor, x: Tensor) -> Tensor:
        """[rows, layers · size] for tokens [rows] with embeddings x [rows, hidden]."""
        seen, scale = kernels.linear(x, self.project), x.shape[1] ** -0.5
        return kernels.layer_inputs(seen, scale, self.norm, self.eps, tokens, self.table, self.table_scale)


@dataclass(slots=True)
class PerLayerGate:
    """Lets a layer's own input through a gate into the rows."""

    gate: Matrix  # [size, hidden]
    project: Matrix  # [hidden, size]
    norm: Tensor  # [hidden]

    def forward(self, kernels: Kernels, x: Tensor, own: Tensor) -> Tensor:
        """What it adds to x [rows, hidden], before its norm; own [rows, size]."""
        return kernels.linear(kernels.gate_linear(x, self.gate, own), self.project)


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
    beside: Beside | None = None  # experts whose answers join the network's
    per_layer: PerLayerGate | None = None
    scalar: float = 1.0  # multiplies what comes out, only where norms follow both parts

    def forward(
        self,
        kernels: Kernels,
        x: Tensor,
        normed: Tensor,
        following: Tensor,
        batch: Pass,
        angles: AllAngles,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows x [rows, hidden] and the same after `input_norm` → both for whoever follows, with the norm `following`.

        Pages and states of the sequences take part. own: the layer's own input.
        """
        eps = self.eps
        if self.post_mixer_norm is None or self.post_feed_forward_norm is None:
            x = self.mixer.forward(kernels, normed, x, batch, angles)
            normed = kernels.rms_norm(x, self.pre_feed_forward_norm, eps)
            x = self.feed_forward.forward(kernels, normed, x)
            return x, kernels.rms_norm(x, following, eps)
        mixed = self.mixer.forward(kernels, normed, None, batch, angles)
        norms = [self.pre_feed_forward_norm, *([] if self.beside is None else self.beside.norms)]
        x, normed, *others = kernels.add_norm(mixed, self.post_mixer_norm, eps, x, 1.0, norms)
        fed = self.feed_forward.forward(kernels, normed, None)
        joined = None if self.beside is None else self.beside.forward(kernels, others)
        if self.per_layer is None:
            x, normed = kernels.add_norm(fed, self.post_feed_forward_norm, eps, x, self.scalar, [following], joined)
            return x, normed
        assert own is not None
        (x,) = kernels.add_norm(fed, self.post_feed_forward_norm, eps, x, 1.0, joined=joined)
        more = self.per_layer.forward(kernels, x, own)
        x, normed = kernels.add_norm(more, self.per_layer.norm, eps, x, self.scalar, [following])
        return x, normed

    def fill(self, kernels: Kernels, x: Tensor, batch: Pass, angles: AllAngles) -> None:
        """Only what later rows read of these: their keys and values."""
        assert isinstance(self.mixer, AttentionMixer)
        self.mixer.fill(kernels, kernels.rms_norm(x, self.input_norm, self.eps), batch, angles)

    @property
    def mixture(self) -> Mixture | None:
        """What sends each row to a few of many experts."""
        return self.feed_forward if isinstance(self.feed_forward, Sparse) else self.beside

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from self.dense_matrices()
        if self.mixture is not None:
            yield from expert_matrices(self.mixture.experts)

    def shapes(self) -> Iterator[Matrix]:
        """One matrix of every shape that goes through `linear`."""
        yield from self.dense_matrices()
        if self.mixture is not None and isinstance(self.mixture.experts, list):
            yield from (self.mixture.experts[0].gate_up, self.mixture.experts[0].down)

    def dense_matrices(self) -> Iterator[Matrix]:
        """Those that every row is multiplied with: all but the experts'."""
        yield from self.mixer.matrices()
        yield from self.feed_forward.matrices()
        if self.beside is not None:
            yield self.beside.router
        if self.per_layer is not None:
            yield from (self.per_layer.gate, self.per_layer.project)


def norms_after(layers: Sequence[Layer], last: Tensor) -> list[Tensor]:
    """The norm that follows each layer: the next one's, and `last` behind the last."""
    return [*(layer.input_norm for layer in layers[1:]), last]
