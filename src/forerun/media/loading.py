"""From a checkpoint to a reader of media. Only its config is looked at; towers are read when media come."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from forerun.media.gemma4 import gemma4_media
from forerun.media.gemma4_unified import unified_media
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaReader
from forerun.media.qwen3_5 import qwen_media
from forerun.media.reader import Family, Reader
from forerun.weights.checkpoint import Checkpoint


def media_reader(
    checkpoint: Checkpoint,
    tokenizer: Any,
    device: torch.device,
    dtype: torch.dtype,
    owner: AbstractContextManager[None],
    limits: MediaLimits | None = None,
    context: int | None = None,
) -> MediaReader | None:
    """None: the model reads text only. `owner` is held while a tower runs; `context`: tokens of it."""
    family = media_family(checkpoint, tokenizer, device, dtype)
    return None if family is None else Reader(family, owner, device, limits or MediaLimits(), context)


def media_family(checkpoint: Checkpoint, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> Family | None:
    """By the type of the whole model."""
    match checkpoint.config.get("model_type"):
        case "gemma4":
            return gemma4_media(checkpoint, tokenizer, device, dtype)
        case "gemma4_unified":
            return unified_media(checkpoint, tokenizer, device, dtype)
        case "qwen3_5" | "qwen3_5_moe":
            return qwen_media(checkpoint, tokenizer, device, dtype)
    return None
