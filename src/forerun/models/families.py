"""From a checkpoint to a decoder."""

from __future__ import annotations

import torch

from forerun.errors import ForerunError
from forerun.kernels.interface import Kernels
from forerun.models import llama, mistral, qwen2, qwen3, qwen3_5, qwen3_5_moe
from forerun.models.layers.decoder import Decoder
from forerun.models.layers.hybrid import HybridDecoder
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

READERS = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}
HYBRID_READERS = {
    "qwen3_5": qwen3_5.read_config,
    "qwen3_5_text": qwen3_5.read_config,
    "qwen3_5_moe": qwen3_5_moe.read_config,
    "qwen3_5_moe_text": qwen3_5_moe.read_config,
}


def build(
    checkpoint: Checkpoint, kernels: Kernels, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Decoder:
    """The decoder of a checkpoint, weights loaded."""
    family = checkpoint.config.get("model_type")
    if family in HYBRID_READERS:
        return HybridDecoder(HYBRID_READERS[family](checkpoint.config), kernels, checkpoint, device, dtype, progress)
    if family not in READERS:
        known = ", ".join(sorted(READERS | HYBRID_READERS))
        raise ForerunError(f"model type {family!r} is not supported; forerun runs {known}")
    return Decoder(READERS[family](checkpoint.config), kernels, checkpoint, device, dtype, progress)
