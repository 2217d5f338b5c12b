"""The decoder shared by llama, mistral, qwen2 and qwen3."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix, Rounded, Weight
from forerun.models.layers.block import Layer, Loader, run_layer
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Output, Pass
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

PACKERS = 2  # packing a matrix runs on one core


class Decoder:
    """Pre-norm blocks of attention and a gated feed-forward layer."""

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.config, self.kernels, self.device, self.dtype = config, kernels, device, dtype
        self.taps: tuple[int, ...] = ()  # layers whose inputs a drafter wants to see
        self._checkpoint = checkpoint
        self.rope = Rope(config.rope, config.layout.size, device)
        loader = Loader(config, kernels, checkpoint, device, dtype)
        self.embedding = embedding_table(
            checkpoint.take("model.embed_tokens.weight", (config.vocab, config.hidden)), device, dtype
        )
        self.layers: list[Layer] = []
        with progress.task("loading weights", config.layers + 1) as task, ThreadPoolExecutor(PACKERS) as packers:
            head = packers.submit(self._pack_head)  # the largest matrix, so it comes first
            for layer in packers.map(partial(read_layer, loader), range(config.layers)):
                self.layers.append(layer)
                task.advance()
            self.norm = loader.vector("model.norm.weight", config.hidden)
            self.head = head.result()
            task.advance()
        checkpoint.finish(lambda name: unused(name, config.tied))

    def _pack_head(self) -> Matrix:
        shape = (self.config.vocab, self.config.hidden)
        head: Weight = self.embedding if self.config.tied else self._checkpoint.weight("lm_head.weight", shape)
        return self.kernels.matrix(head.to(self.device, self.dtype), None)

    @property
    def weight_bytes(self) -> int:
        """Bytes held by matrices and the embedding table."""
        total = self.head.bytes + self.embedding.numel() * self.embedding.element_size()
        return total + sum(matrix.bytes for matrix in self.block_matrices())

    def block_matrices(self) -> Iterator[Matrix]:
        """The matrices of all blocks."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)

    def matrices(self) -> list[Matrix]:
        """One matrix of every shape that a pass multiplies with; the exactness probe tries each."""
        layer = self.layers[0]
        return [layer.qkv, layer.output, layer.gate_up, layer.down, self.head]

    def gated_matrices(self) -> list[Matrix]:
        """Those among `matrices` that a pass multiplies with through `gated_linear`."""
        return [self.layers[0].gate_up]

    def forward(self, batch: Pass) -> Output:
        """Run all rows; keys and values of every row are written to its sequence's pages."""
        kernels, config = self.kernels, self.config
        angles = self.rope.angles(batch)
        x = self.kernels.embed(batch.tokens, self.embedding).to(self.dtype)  # [rows, hidden]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if batch.features and index in self.taps:
                tapped[index] = x
            x = run_layer(kernels, config, layer, x, batch, batch.pages[index], angles)
        hidden = kernels.rms_norm(x, self.norm, config.eps)
        wanted = hidden if batch.wanted is None else hidden[batch.wanted]
        features = torch.cat([*(tapped[tap] for tap in self.taps), hidden], dim=1) if batch.features else None
        return Output(kernels.logits(wanted, self.head), hidden, features)

    def output_rows(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of the output matrix as the checkpoint has them, before they were packed."""
        if self.config.tied:
            return self.embedding[ids]
        shape = (self.config.vocab, self.config.hidden)
        rows = self._checkpoint.weight("lm_head.weight", shape)[ids.cpu()]
        return (rows.float() if isinstance(rows, Rounded) else rows).to(self.device)

    def native_head(self) -> MtpHead | None:
        """The head the checkpoint came with; these families have none."""
        return None


def embedding_table(stored: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """On a GPU in the precision of activations; on a CPU as stored, mapped from the file."""
    return stored.to(device) if device.type == "cpu" else stored.to(device, dtype)


def read_layer(loader: Loader, index: int) -> Layer:
    """Block `index` of a checkpoint."""
    return loader.layer(f"model.layers.{index}.", loader.config.windows[index])


def unused(name: str, tied: bool) -> bool:
    """Tensors a checkpoint may carry that this decoder does not need."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
