"""From a checkpoint to a reader of media. Only its config is looked at; towers are read when media come."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from forerun.media import qwen3_5
from forerun.media.gemma4 import GemmaMedia
from forerun.media.gemma4_towers import Gemma4Towers, UnifiedTowers
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaReader
from forerun.media.qwen3_5 import QwenMedia
from forerun.media.reader import Family, LocalMediaReader
from forerun.media.towers import has_tensors, weight_bytes
from forerun.weights.checkpoint import Checkpoint

CONFIGS: dict[Kind, str] = {"image": "vision_config", "audio": "audio_config"}
GEMMA_TOWERS = {"gemma4": Gemma4Towers, "gemma4_unified": UnifiedTowers}
TENSORS = {name: towers.tensors for name, towers in GEMMA_TOWERS.items()}
TENSORS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), qwen3_5.TENSORS)


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
    return LocalMediaReader(family, owner, device, limits or MediaLimits(), context, weight_bytes=weights)


def media_family(checkpoint: Checkpoint, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> Family | None:
    """By the type of the whole model."""
    kinds = frozenset(readable(checkpoint))
    if not kinds:
        return None
    if "image" in kinds:
        kinds |= {"video"}
    towers = GEMMA_TOWERS.get(checkpoint.config["model_type"])
    if towers is None:
        return QwenMedia(checkpoint, tokenizer, device, dtype)
    return GemmaMedia(checkpoint, tokenizer, towers(checkpoint, device, dtype), kinds)


def media_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes of all towers that media may ask for; 0: the model reads text only."""
    return weight_bytes(checkpoint, [name for names in readable(checkpoint).values() for name in names], dtype)


def readable(checkpoint: Checkpoint) -> dict[Kind, tuple[str, ...]]:
    """How tensors of towers begin, by kind: of those with a config and the first of their tensors. Some copies were
    cut down to less.
    """
    tensors = TENSORS.get(checkpoint.config["model_type"], {})
    return {
        kind: names
        for kind, names in tensors.items()
        if CONFIGS[kind] in checkpoint.reader and has_tensors(checkpoint, names[0])
    }
