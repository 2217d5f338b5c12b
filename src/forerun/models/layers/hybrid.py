"""The decoder of Qwen3.5, dense and sparse: recurrent layers with an attention layer every so often."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.interface import Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.decoder import PACKERS, Decoder, embedding_table
from forerun.models.layers.delta import AttentionMixer, DeltaMixer
from forerun.models.layers.experts import FeedForward
from forerun.models.layers.hybrid_config import HybridConfig
from forerun.models.layers.hybrid_loader import HybridLoader
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.native import native_head
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Output, Pass
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

PREFIXES = ("model.language_model.", "model.")  # beside a vision model, or alone
VISION = ("model.visual.", "visual.")
HEAD = "mtp."


@dataclass(slots=True)
class HybridLayer:
    """Weights of one block."""

    input_norm: Tensor  # [hidden]
    mixer: DeltaMixer | AttentionMixer
    post_norm: Tensor  # [hidden]
    feed_forward: FeedForward

    def matrices(self) -> Iterator[Matrix]:
        """All weights."""
        yield from self.mixer.matrices()
        yield from self.feed_forward.matrices()


class HybridDecoder(Decoder):
    """The same surface as `Decoder`, with blocks of its own."""

    config: HybridConfig

    def __init__(
        self,
        config: HybridConfig,
        kernels: Kernels,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.config, self.kernels, self.device, self.dtype = config, kernels, device, dtype
        self.taps = ()
        self._checkpoint = checkpoint
        refuse_mlx(checkpoint)
        self.rope = Rope(config.rope, config.rotary, device)
        prefix = next((p for p in PREFIXES if checkpoint.has(p + "embed_tokens.weight")), PREFIXES[-1])
        loader = HybridLoader(config, kernels, checkpoint, device, dtype)
        shape = (config.vocab, config.hidden)
        self.embedding = embedding_table(checkpoint.take(prefix + "embed_tokens.weight", shape), device, dtype)
        self.blocks: list[HybridLayer] = []
        with progress.task("loading weights", config.layers + 1) as task, ThreadPoolExecutor(PACKERS) as packers:
            head = packers.submit(self._pack_head)
            for block in packers.map(partial(read_block, loader, prefix), range(config.layers)):
                self.blocks.append(block)
                task.advance()
            self.norm = loader.gain(prefix + "norm.weight", config.hidden)
            self.head = head.result()
            task.advance()
        checkpoint.finish(lambda name: unused(name, config.tied))

    def block_matrices(self) -> Iterator[Matrix]:
        for block in self.blocks:
            yield from block.matrices()

    def matrices(self) -> list[Matrix]:
        """One matrix of every shape that a pass multiplies with; the exactness probe tries each."""
        found = [self.head]
        for recurrent in (True, False):
            block = self.blocks[self.config.recurrent.index(recurrent)]
            found += [*block.mixer.matrices(), *block.feed_forward.shapes()]
        return list({matrix.shape: matrix for matrix in found}.values())

    def gated_matrices(self) -> list[Matrix]:
        return [self.blocks[self.config.recurrent.index(kind)].feed_forward.gated for kind in (True, False)]

    def forward(self, batch: Pass) -> Output:
        """Run all rows; each sequence's pages and state take part."""
        kernels, eps = self.kernels, self.config.eps
        angles = self.rope.angles(batch)
        pages = iter(batch.pages)
        x = self.kernels.embed(batch.tokens, self.embedding).to(self.dtype)  # [rows, hidden]
        tapped: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            if batch.features and index in self.taps:
                tapped[index] = x
            normed = kernels.rms_norm(x, block.input_norm, eps)
            if isinstance(block.mixer, DeltaMixer):
                x = block.mixer.forward(kernels, normed, x, batch, eps)
            else:
                x = block.mixer.forward(kernels, normed, x, batch, next(pages), angles)
            normed = kernels.rms_norm(x, block.post_norm, eps)
            x = block.feed_forward.forward(kernels, normed, x, batch.prefill)
        hidden = kernels.rms_norm(x, self.norm, eps)
        wanted = hidden if batch.wanted is None else hidden[batch.wanted]
        features = torch.cat([*(tapped[tap] for tap in self.taps), hidden], dim=1) if batch.features else None
        return Output(kernels.logits(wanted, self.head), hidden, features)

    def native_head(self) -> MtpHead | None:
        """The head the checkpoint came with; None when it never had one, an error when it was lost or does not fit."""
        loader = HybridLoader(self.config, self.kernels, self._checkpoint, self.device, self.dtype)
        return native_head(loader, self.embedding, self.head, self.rope)


def read_block(loader: HybridLoader, prefix: str, index: int) -> HybridLayer:
    """Block `index` of a checkpoint."""
    config, here = loader.config, f"{prefix}layers.{index}."
    mixer: DeltaMixer | AttentionMixer
    if config.recurrent[index]:
        mixer = loader.delta(here + "linear_attn.", sum(config.recurrent[:index]))
    else:
        mixer = loader.attention(here + "self_attn.")
    return HybridLayer(
        input_norm=loader.gain(here + "input_layernorm.weight", config.hidden),
        mixer=mixer,
        post_norm=loader.gain(here + "post_attention_layernorm.weight", config.hidden),
        feed_forward=loader.feed_forward(here + "mlp."),
    )


def refuse_mlx(checkpoint: Checkpoint) -> None:
    """MLX moves an axis of the convolutions, adds one to the norms and drops the head."""
    name = next((name for name in sorted(checkpoint.names()) if name.endswith("linear_attn.conv1d.weight")), None)
    if name is not None and checkpoint.shape(name)[1] != 1 and checkpoint.shape(name)[-1] == 1:
        raise ForerunError(
            f"{checkpoint.path} was written by MLX, whose norms are shifted and which drops the MTP head: "
            "use the original Hugging Face checkpoint"
        )


def unused(name: str, tied: bool) -> bool:
    """Vision tensors, the head (read when it is asked for), and what a tied model may carry twice."""
    return (
        name.startswith((*VISION, HEAD)) or name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
    )
