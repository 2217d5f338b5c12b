"""The multi-token-prediction head that Qwen3.5 checkpoints ship: `mtp.*`, one gated attention block of its own.

Files in Hugging Face layout store every norm of the head zero-centred (the factor is 1 + w), whatever the values look
like: two of the seven have true factors that a guess from their size would get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.interface import HeadLayout, Kernels
from forerun.kernels.matrix import Matrix
from forerun.models.layers.delta import AttentionMixer
from forerun.models.layers.experts import FeedForward
from forerun.models.layers.hybrid_loader import HybridLoader
from forerun.models.layers.mtp import MtpHead
from forerun.models.layers.rope import Rope
from forerun.models.layers.rows import Pass

BLOCK = "mtp.layers.0."


@dataclass(slots=True)
class GatedBlock:
    """The attention block of a native head, experts included where the model has them."""

    kernels: Kernels
    rope: Rope
    eps: float
    input_norm: Tensor  # [hidden]
    mixer: AttentionMixer
    post_norm: Tensor  # [hidden]
    feed_forward: FeedForward

    @property
    def layout(self) -> HeadLayout:
        return self.mixer.layout

    def forward(self, x: Tensor, batch: Pass) -> Tensor:
        """[rows, hidden] → [rows, hidden]; its keys and values live in `batch.pages[0]`."""
        kernels = self.kernels
        angles = self.rope.angles(batch)
        normed = kernels.rms_norm(x, self.input_norm, self.eps)
        x = self.mixer.forward(kernels, normed, x, batch, batch.pages[0], angles)
        normed = kernels.rms_norm(x, self.post_norm, self.eps)
        return self.feed_forward.forward(kernels, normed, x, batch.prefill)

    def fill(self, x: Tensor, batch: Pass) -> None:
        """Only what later slots read of these: their keys and values."""
        normed = self.kernels.rms_norm(x, self.input_norm, self.eps)
        self.mixer.write_keys(self.kernels, normed, batch, batch.pages[0], self.rope.angles(batch))


def native_head(loader: HybridLoader, embedding: Tensor, output: Matrix, rope: Rope) -> MtpHead | None:
    """The head of a checkpoint; None when it neither has nor declares one."""
    config, checkpoint = loader.config, loader.checkpoint
    present = any(name.startswith("mtp.") for name in checkpoint.names())
    if not present and not config.mtp_layers:
        return None
    if not present:
        raise ForerunError(
            f"{checkpoint.path}: config.json declares an MTP head (mtp_num_hidden_layers = {config.mtp_layers}) but "
            "the weights hold no mtp.* tensors: they were stripped; use the original checkpoint or train a head"
        )
    if config.mtp_layers > 1 or any(name.startswith("mtp.layers.1.") for name in checkpoint.names()):
        raise ForerunError(f"{checkpoint.path}: an MTP head of more than one block is not supported")
    if config.mtp_own_embedding:
        raise ForerunError(f"{checkpoint.path}: an MTP head with an embedding of its own is not supported")
    hidden = config.hidden
    block = GatedBlock(
        kernels=loader.kernels,
        rope=rope,
        eps=config.eps,
        input_norm=loader.gain(BLOCK + "input_layernorm.weight", hidden),
        mixer=loader.attention(BLOCK + "self_attn."),
        post_norm=loader.gain(BLOCK + "post_attention_layernorm.weight", hidden),
        feed_forward=loader.feed_forward(BLOCK + "mlp."),
    )
    head = MtpHead(
        kernels=loader.kernels,
        block=block,
        embedding=embedding,
        embedding_norm=loader.gain("mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=loader.gain("mtp.pre_fc_norm_hidden.weight", hidden),
        final_norm=loader.gain("mtp.norm.weight", hidden),
        fc=loader.kernels.float_matrix(loader.tensor("mtp.fc.weight", hidden, 2 * hidden), None),
        eps=config.eps,
        output=output,
    )
    checkpoint.finish(lambda name: not name.startswith("mtp."))
    return head
