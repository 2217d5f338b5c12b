"""From a checkpoint to a reader of media. Only its config is looked at; towers are read when media come."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from forerun.media import gemma4, gemma4_unified, qwen3_5
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaReader
from forerun.media.reader import Family, Reader
from forerun.media.towers import weight_bytes
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
    if family is None:
        return None
    weights = media_weights(checkpoint, dtype)
    return Reader(family, owner, device, limits or MediaLimits(), context, weight_bytes=weights)


def media_family(checkpoint: Checkpoint, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> Family | None:
    """By the type of the whole model."""
    match checkpoint.config.get("model_type"):
        case "gemma4":
            return gemma4.gemma4_media(checkpoint, tokenizer, device, dtype)
        case "gemma4_unified":
            return gemma4_unified.unified_media(checkpoint, tokenizer, device, dtype)
        case "qwen3_5" | "qwen3_5_moe":
            return qwen3_5.qwen_media(checkpoint, tokenizer, device, dtype)
    return None


def media_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all towers that media may ask for; 0: the model reads text only."""
    beginnings: list[str] = []
    match checkpoint.config.get("model_type"):
        case "gemma4" | "gemma4_unified" as name:
            tensors = gemma4.TENSORS if name == "gemma4" else gemma4_unified.TENSORS
            kinds = gemma4.readable_kinds(checkpoint, tensors)
            beginnings = [beginning for kind in tensors if kind in kinds for beginning in tensors[kind]]
        case "qwen3_5" | "qwen3_5_moe" if qwen3_5.has_tower(checkpoint):
            beginnings = [f"{qwen3_5.TOWER}."]
    return weight_bytes(checkpoint, beginnings, dtype)
