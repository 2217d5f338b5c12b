"""The multi-token-prediction head that Qwen3.5 checkpoints ship: `mtp.*`, one gated attention block of its own.

Files in Hugging Face layout store every norm of the head zero-centred (the factor is 1 + w), whatever the values look
like: two of the seven have true factors that a guess from their size would get wrong.
"""

from __future__ import annotations

from torch import Tensor

from forerun.errors import ForerunError
from forerun.kernels.matrix import Matrix
from forerun.models.layers.config import AttentionConfig
from forerun.models.layers.loader import Loader
from forerun.models.layers.mtp import MtpHead

BLOCK = "mtp.layers.0."


def native_head(loader: Loader, embedding: Tensor, output: Matrix) -> MtpHead | None:
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
    kind = next(layer for layer in config.layers if isinstance(layer.mixer, AttentionConfig))
    head = MtpHead(
        kernels=loader.kernels,
        block=loader.layer(BLOCK, kind, 0),
        rope=loader.rope,
        embedding=embedding,
        embedding_norm=loader.norm("mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=loader.norm("mtp.pre_fc_norm_hidden.weight", hidden),
        final_norm=loader.norm("mtp.norm.weight", hidden),
        fc=loader.exact("mtp.fc.weight", hidden, 2 * hidden),
        eps=config.eps,
        output=output,
    )
    checkpoint.finish(lambda name: not name.startswith("mtp."))
    return head
