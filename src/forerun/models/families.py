"""From a checkpoint to a decoder."""

from __future__ import annotations

import torch

from forerun.errors import ForerunError
from forerun.kernels.interface import Kernels
from forerun.models import llama, mistral, qwen2, qwen3
from forerun.models.layers.decoder import Decoder
from forerun.progress import Progress
from forerun.weights.checkpoint import Checkpoint

READERS = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def build(
    checkpoint: Checkpoint, kernels: Kernels, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Decoder:
    """The decoder of a checkpoint, weights loaded."""
    family = checkpoint.config.get("model_type")
    if family not in READERS:
        known = ", ".join(sorted(READERS))
        raise ForerunError(f"model type {family!r} is not supported; forerun runs {known}")
    return Decoder(READERS[family](checkpoint.config), kernels, checkpoint, device, dtype, progress)
