"""From a checkpoint to a decoder."""

from __future__ import annotations

import torch

from forerun.errors import ForerunError
from forerun.kernels.interface import Kernels
from forerun.models import gemma3, gemma4, llama, qwen3_5
from forerun.models.layers.config import DecoderConfig
from forerun.models.layers.decoder import Decoder
from forerun.progress import Progress
from forerun.weights.assistants import MODEL_TYPES
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader
from forerun.weights.generation_config import suppressed_tokens

READERS = {
    "gemma3": gemma3.read_config,
    "gemma3_text": gemma3.read_config,
    "gemma4": gemma4.read_config,
    "gemma4_text": gemma4.read_config,
    "gemma4_unified": gemma4.read_config,
    "gemma4_unified_text": gemma4.read_config,
    "llama": llama.read_llama,
    "mistral": llama.read_mistral,
    "qwen2": llama.read_qwen2,
    "qwen3": llama.read_qwen3,
    "qwen3_5": qwen3_5.read_dense,
    "qwen3_5_text": qwen3_5.read_dense,
    "qwen3_5_moe": qwen3_5.read_sparse,
    "qwen3_5_moe_text": qwen3_5.read_sparse,
}
TRAINABLE = ("llama", "mistral", "qwen2", "qwen3")  # families that heads can be trained for


def read_config(config: ConfigReader) -> DecoderConfig:
    """What a config.json describes, in the words of its family."""
    family = config.text("model_type")
    if family in MODEL_TYPES:
        raise ForerunError(
            f"{config.where}: {family} is an assistant: load the model it belongs to and name it with --draft-model"
        )
    if family not in READERS:
        known = ", ".join(sorted(READERS))
        raise ForerunError(f"{config.where}: model type {family[:40]!r} is not supported; forerun runs {known}")
    text = config.text_model()
    text.only("is_causal", True)
    if not family.startswith("gemma4"):  # whose layers differ
        text.only("per_layer_config", None, {})
    return READERS[family](config)


def build(
    checkpoint: Checkpoint, kernels: Kernels, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Decoder:
    """The decoder of a checkpoint, weights loaded."""
    decoder = Decoder(read_config(checkpoint.reader), kernels, checkpoint, device, dtype, progress)
    decoder.rule_out({*decoder.config.never, *suppressed_tokens(checkpoint.path)})
    return decoder
