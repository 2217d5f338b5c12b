"""The decoder that all families share: layers as their files describe them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from forerun.kernels.interface import Activation, Kernels
from forerun.kernels.matrix import Matrix, Weight, as_tensor
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.layer import Layer, norms_after
from forerun.models.layers.loader import Loader, embedding_table, rounded
from forerun.models.layers.mixers import AllAngles
from forerun.models.layers.mtp import MtpHead, native_head
from forerun.models.layers.rope import RopeTables
from forerun.models.layers.rows import Output, Pass
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

PACKERS = 2  # packing a matrix runs on one core
MEDIA_TOKEN = 0  # whose per-layer embedding rows of media get: padding


class Decoder:
    """A list of layers between an embedding and an output matrix."""

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.kernels, self.device, self.dtype = kernels, device, dtype
        self.taps: tuple[int, ...] = ()  # layers whose inputs a drafter wants to see
        self._checkpoint = checkpoint
        table = "embed_tokens.weight"
        prefix = next((each for each in config.prefixes if checkpoint.has(each + table)), config.prefixes[-1])
        stored = checkpoint.table(prefix + table, (config.vocab, config.hidden))
        self.config = config = replace(config, tied=config.tied and not has_own_output(checkpoint, prefix + table))
        self.rope = RopeTables(config.ropes, device)
        self._loader = loader = Loader(config, kernels, checkpoint, device, dtype, self.rope)
        self.embedding = embedding_table(stored, device, dtype)
        self.embedding_scale = rounded(config.embedding_scale, stored.dtype)
        self.never: Tensor | None = None  # tokens that are never chosen, [n] int64
        self.layers: list[Layer] = []

        def read_layer(index: int) -> Layer:
            return loader.layer(f"{prefix}layers.{index}.", config.layers[index], config.state_index(index))

        count = len(config.layers)
        with progress.task("loading weights", count + 1) as task, ThreadPoolExecutor(PACKERS) as packers:
            head = packers.submit(self._pack_head)  # the largest matrix, so it comes first
            for layer in packers.map(read_layer, range(count)):
                self.layers.append(layer)
                checkpoint.release()
                task.advance()
            own = config.per_layer
            self.per_layer = None if own is None else loader.per_layer_inputs(prefix, count, own)
            self.norm = loader.norm(prefix + "norm.weight", config.hidden)
            self.head = head.result()
            checkpoint.release()
            task.advance()
        checkpoint.finish(lambda name: unused(name, config))

    @property
    def checkpoint(self) -> Checkpoint:
        """Where its weights are from."""
        return self._checkpoint

    def adopt(self, other: Decoder) -> None:
        """The weights of another one with the same config, from now on; what drafters asked of this one stays."""
        self._checkpoint, self._loader, self.rope = other._checkpoint, other._loader, other.rope
        self.embedding, self.head, self.norm = other.embedding, other.head, other.norm
        self.layers, self.per_layer, self.never = other.layers, other.per_layer, other.never

    def _pack_head(self) -> Matrix:
        shape = (self.config.vocab, self.config.hidden)
        head: Weight = self.embedding if self.config.tied else self._checkpoint.weight("lm_head.weight", shape)
        return self.kernels.matrix(head.to(self.device, self.dtype), None)

    @property
    def weight_bytes(self) -> int:
        """Bytes held by matrices and the embedding table."""
        total = self.head.bytes + self.embedding.nbytes
        if self.per_layer is not None:
            total += self.per_layer.table.nbytes
        return total + sum(matrix.bytes for matrix in self.block_matrices())

    def block_matrices(self) -> Iterator[Matrix]:
        """The matrices of all layers, and what makes their own inputs."""
        if self.per_layer is not None:
            yield self.per_layer.project
        for layer in self.layers:
            yield from layer.matrices()

    def matrices(self) -> list[Matrix]:
        """One matrix of every kind that a pass multiplies with."""
        return [matrix for matrix, _ in self.products()]

    def products(self) -> list[tuple[Matrix, Activation | None]]:
        """The first matrix of each kind and shape; those that go through `gated_linear` apart, by their activation."""
        kinds: dict[tuple[tuple[str, ...], tuple[int, int], Activation | None], Matrix] = {}
        kinds[self.head.kind, self.head.shape, None] = self.head
        if self.per_layer is not None:
            kinds[self.per_layer.project.kind, self.per_layer.project.shape, None] = self.per_layer.project
        for layer in self.layers:
            network = layer.feed_forward
            for matrix in layer.shapes():
                activation = network.activation if matrix is network.gated else None
                kinds.setdefault((matrix.kind, matrix.shape, activation), matrix)
        return [(matrix, activation) for (_, _, activation), matrix in kinds.items()]

    def forward(self, batch: Pass) -> Output:
        """Run all rows; each sequence's pages and state take part."""
        return self.run(self.kernels, batch, self.rope.angles(batch), *self.inputs(batch))

    def inputs(self, batch: Pass) -> tuple[Tensor, Tensor]:
        """What the first layer reads [rows, hidden], and the tokens [rows] that layers with inputs of their own see."""
        x, tokens = self.embed(batch.tokens), batch.tokens
        if batch.media is None:
            return x, tokens
        return batch.media.merge(x), batch.media.text(tokens, MEDIA_TOKEN)

    def run(self, kernels: Kernels, batch: Pass, angles: AllAngles, x: Tensor, tokens: Tensor) -> Output:
        """All layers, by `kernels`: they may also write down what they would do."""
        own = None
        if self.per_layer is not None:
            own = self.per_layer.forward(kernels, tokens, x)
        tapped: dict[int, Tensor] = {}
        hidden = kernels.rms_norm(x, self.layers[0].input_norm, self.config.eps)
        for index, (layer, norm) in enumerate(zip(self.layers, norms_after(self.layers, self.norm), strict=True)):
            if batch.features and index in self.taps:
                tapped[index] = x
            mine = None
            if own is not None and self.per_layer is not None:
                size = len(self.per_layer.norm)
                mine = own[:, index * size : (index + 1) * size]
            x, hidden = layer.forward(kernels, x, hidden, norm, batch, angles, mine)
        features = kernels.beside([*(tapped[tap] for tap in self.taps), hidden]) if batch.features else None
        return Output(self._logits(kernels, kernels.pick(hidden, batch.wanted)), features)

    def logits(self, features: Tensor) -> Tensor:
        """Of rows that were run, by their features: float32 [rows, vocabulary]."""
        return self._logits(self.kernels, features[:, -self.config.hidden :].contiguous())

    def _logits(self, kernels: Kernels, hidden: Tensor) -> Tensor:
        logits = kernels.logits(hidden, self.head, self.config.softcap)
        return logits if self.never is None else kernels.rule_out(logits, self.never)

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer reads of tokens [rows]: [rows, hidden]."""
        x = self.kernels.embed(tokens, self.embedding).to(self.dtype)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def rule_out(self, tokens: Iterable[int]) -> None:
        """Tokens that no pass gives a chance, whoever runs it and whatever a request asks for."""
        known = sorted(token for token in set(tokens) if token < self.config.vocab)
        self.never = torch.tensor(known, device=self.device) if known else None

    def output_rows(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of the output matrix as the checkpoint has them, before they were packed."""
        if self.config.tied:
            return as_tensor(self.embedding[ids])
        shape = (self.config.vocab, self.config.hidden)
        rows = self._checkpoint.weight("lm_head.weight", shape)[ids.cpu()]
        return (rows if isinstance(rows, Tensor) else rows.float()).to(self.device)

    def native_head(self) -> MtpHead | None:
        """The head the checkpoint came with; None when it never had one, an error when it was lost or does not fit."""
        return native_head(self._loader, self.embedding, self.head)


def has_own_output(checkpoint: Checkpoint, embedding: str) -> bool:
    """Is there an output matrix that is not the embedding? transformers uses it then, whatever config.json says."""
    return checkpoint.has("lm_head.weight") and not checkpoint.same("lm_head.weight", embedding)


def unused(name: str, config: DecoderConfig) -> bool:
    """Tensors a checkpoint may carry that the decoder does not need; a head's are read when it is asked for."""
    twice = config.tied and name == "lm_head.weight"
    return twice or name.endswith("rotary_emb.inv_freq") or name.startswith(config.ignored + config.towers)
