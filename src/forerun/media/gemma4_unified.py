"""Media of `gemma4_unified`: no towers; patches of pictures and frames of sound are projected as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.media.gemma4 import GemmaMedia, feature_extractor, readable_kinds
from forerun.media.parts import Kind
from forerun.media.towers import has_tensors, load_module, tower_config
from forerun.models.gemma4 import text_model
from forerun.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy

TENSORS: Mapping[Kind, tuple[str, ...]] = {  # see `media/gemma4.py`
    "image": ("embed_vision.", "vision_embedder."),
    "audio": ("embed_audio.",),
}
PROJECTION = "multimodal_embedder."  # inside the module, of what files keep beside its other tensors


class UnifiedTowers:
    """Small modules of transformers in the place of towers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        vision = checkpoint.reader.part("vision_config")
        self.patch = vision.integer("patch_size", 16, high=64) * vision.integer("pooling_kernel_size", 3, high=16)
        self.places = vision.integer("mm_posemb_size", 1120)
        self._listening = threading.Lock()
        self._vision: Any = None
        self._audio: Any = None
        self._extractor: Any = None

    def load(self, kind: Kind) -> None:
        """See `Family.load`."""
        from transformers import Gemma4UnifiedAudioConfig, Gemma4UnifiedVisionConfig
        from transformers.models.gemma4_unified import modeling_gemma4_unified as modules

        if kind == "audio" and self._audio is None:
            classes = Gemma4UnifiedAudioConfig, modules.Gemma4UnifiedMultimodalEmbedder
            self._audio = self._module("audio_config", classes, lambda key: f"embed_audio.{key}")
        if kind != "audio" and self._vision is None:
            classes = Gemma4UnifiedVisionConfig, modules.Gemma4UnifiedVisionEmbedder
            self._vision = self._module("vision_config", classes, self._name)

    def _module(self, part: str, classes: tuple[Any, Any], rename: Callable[[str], str]) -> Any:
        config = tower_config(self._checkpoint, part, classes[0])
        text = SimpleNamespace(hidden_size=text_model(self._checkpoint.reader).integer("hidden_size"))
        place = (self._device, self._dtype)
        return load_module(self._checkpoint, part, lambda: classes[1](config, text), rename, *place)

    def _name(self, key: str) -> str:
        """What a file calls a tensor of the vision module: published ones and those transformers saves differ."""
        if not has_tensors(self._checkpoint, "vision_embedder."):
            return f"embed_vision.{key}"
        if key.startswith(PROJECTION):
            return f"embed_vision.{key.removeprefix(PROJECTION)}"
        return f"vision_embedder.{key}"

    def see(self, patches: Tensor, positions: Tensor) -> Tensor:
        """See `Towers.see`."""
        inputs = patches.to(self._device, self._dtype)
        seen = self._vision(inputs, positions.to(self._device), return_dict=True).pooler_output
        rows: Tensor = seen.flatten(0, 1)  # [pictures, n, hidden]
        return rows

    def listen(self, sound: numpy.ndarray[Any, Any]) -> tuple[tuple[Tensor, ...], int]:
        """See `Towers.listen`: a row is a frame of samples."""
        with self._listening:
            if self._extractor is None:
                self._extractor = feature_extractor(self._checkpoint, "Gemma4UnifiedAudioFeatureExtractor")
        features = self._extractor(sound, return_tensors="pt")["input_features"][0]  # [frames, samples]
        return (features,), len(features)

    def hear(self, *inputs: Tensor) -> Tensor:
        """See `Towers.hear`."""
        rows: Tensor = self._audio(inputs[0].to(self._device, self._dtype))
        return rows


def unified_media(
    checkpoint: Checkpoint, tokenizer: Any, device: torch.device, dtype: torch.dtype
) -> GemmaMedia | None:
    """None: the checkpoint was cut down to its text model."""
    kinds = readable_kinds(checkpoint, TENSORS)
    return GemmaMedia(checkpoint, tokenizer, UnifiedTowers(checkpoint, device, dtype), kinds) if kinds else None
