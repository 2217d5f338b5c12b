"""What turns prepared pictures and sound into rows of a Gemma 4: towers, and in `gemma4_unified` small projections."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.media.parts import Kind
from forerun.media.sounds import RATE
from forerun.media.towers import has_tensors, load_module, load_tower, processor_settings, tower_config
from forerun.models.gemma4 import text_model
from forerun.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy

PROJECTION = "multimodal_embedder."  # inside a module of `gemma4_unified`, of what files keep beside its other tensors


class Gemma4Towers:
    """transformers' towers, read when they are first needed."""

    tensors: Mapping[Kind, tuple[str, ...]] = {  # how the names of those begin that a kind needs; films need pictures'
        "image": ("vision_tower.", "embed_vision."),
        "audio": ("audio_tower.", "embed_audio."),
    }
    extractor_class = "Gemma4AudioFeatureExtractor"

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.place = checkpoint, (device, dtype)
        self.text = SimpleNamespace(hidden_size=text_model(checkpoint.reader).integer("hidden_size"))
        self._loaded: dict[str, Any] = {}  # by "vision" and "audio"

    @property
    def patch(self) -> int:
        """Pixels of a side of what is one input of the tower."""
        return self.checkpoint.reader.part("vision_config").integer("patch_size", 16, high=64)

    @property
    def places(self) -> int:
        """Columns, and rows, that the tower has a position for."""
        return self.checkpoint.reader.part("vision_config").integer("position_embedding_size", 10_240)

    @cached_property
    def extractor(self) -> Any:
        """transformers' extractor of features of sound, with the folder's settings."""
        import transformers

        settings = processor_settings(self.checkpoint, "feature_extractor")
        settings.only("sampling_rate", RATE)
        try:
            return getattr(transformers, self.extractor_class)(**settings.values)
        except Exception as error:  # the class checks its fields itself
            raise ForerunError(
                f"{settings.where}: the feature extractor's settings are not ones of {self.extractor_class}"
            ) from error

    def load(self, kind: Kind) -> None:
        """See `Family.load`."""
        name = "audio" if kind == "audio" else "vision"
        if name not in self._loaded:
            self._loaded[name] = self._load(name)

    def _load(self, name: str) -> Any:
        """A tower, and what fits its rows to the decoder."""
        import transformers
        from transformers.models.gemma4 import modeling_gemma4 as modules

        part, family = f"{name}_config", f"Gemma4{name.title()}"
        classes = getattr(transformers, f"{family}Config"), getattr(modules, f"{family}Model")
        tower = load_tower(self.checkpoint, part, classes, f"{name}_tower", *self.place)
        embedder = load_module(
            self.checkpoint,
            part,
            lambda: modules.Gemma4MultimodalEmbedder(tower.config, self.text),
            lambda key: f"embed_{name}.{key}",
            *self.place,
        )
        return tower, embedder

    def see(self, patches: Tensor, positions: Tensor) -> Tensor:
        """[rows of all pictures, hidden] of patches [pictures, n, values] at (x, y) [pictures, n, 2]."""
        tower, embedder = self._loaded["vision"]
        seen = tower(pixel_values=patches.to(*self.place), pixel_position_ids=positions.to(self.place[0]))
        rows: Tensor = embedder(inputs_embeds=seen.last_hidden_state)
        return rows

    def listen(self, sound: numpy.ndarray[Any, Any]) -> tuple[tuple[Tensor, ...], int]:
        """Inputs of `hear`, and how many rows come out: two convolutions halve the frames of the spectrogram twice."""
        features = self.extractor([sound], return_tensors="pt")
        mask = features["input_features_mask"].bool()
        return (features["input_features"], mask), int(mask[:, ::4].sum())

    def hear(self, *inputs: Tensor) -> Tensor:
        """[rows, hidden]"""
        tower, embedder = self._loaded["audio"]
        heard = tower(inputs[0].to(*self.place), inputs[1].to(self.place[0]), return_dict=True)
        rows: Tensor = embedder(inputs_embeds=heard.last_hidden_state)[heard.attention_mask]
        return rows


class UnifiedTowers(Gemma4Towers):
    """No towers: patches of pictures and frames of sound are projected as they are."""

    tensors: Mapping[Kind, tuple[str, ...]] = {
        "image": ("embed_vision.", "vision_embedder."),
        "audio": ("embed_audio.",),
    }
    extractor_class = "Gemma4UnifiedAudioFeatureExtractor"

    @property
    def patch(self) -> int:
        """See `Gemma4Towers.patch`."""
        return super().patch * self.checkpoint.reader.part("vision_config").integer("pooling_kernel_size", 3, high=16)

    @property
    def places(self) -> int:
        """See `Gemma4Towers.places`."""
        return self.checkpoint.reader.part("vision_config").integer("mm_posemb_size", 1120)

    def _load(self, name: str) -> Any:
        import transformers
        from transformers.models.gemma4_unified import modeling_gemma4_unified as modules

        part = f"{name}_config"
        config = tower_config(self.checkpoint, part, getattr(transformers, f"Gemma4Unified{name.title()}Config"))
        embedder = "VisionEmbedder" if name == "vision" else "MultimodalEmbedder"
        make = getattr(modules, f"Gemma4Unified{embedder}")
        published = name == "vision" and has_tensors(self.checkpoint, "vision_embedder.")

        def file_name(key: str) -> str:
            """What a file calls a tensor of the module: published ones and those transformers saves differ."""
            if published and not key.startswith(PROJECTION):
                return f"vision_embedder.{key}"
            return f"embed_{name}.{key.removeprefix(PROJECTION) if published else key}"

        return load_module(self.checkpoint, part, lambda: make(config, self.text), file_name, *self.place)

    def see(self, patches: Tensor, positions: Tensor) -> Tensor:
        """See `Gemma4Towers.see`."""
        seen = self._loaded["vision"](patches.to(*self.place), positions.to(self.place[0]), return_dict=True)
        rows: Tensor = seen.pooler_output.flatten(0, 1)  # [pictures, n, hidden]
        return rows

    def listen(self, sound: numpy.ndarray[Any, Any]) -> tuple[tuple[Tensor, ...], int]:
        """See `Gemma4Towers.listen`: a row is a frame of samples."""
        features = self.extractor(sound, return_tensors="pt")["input_features"][0]  # [frames, samples]
        return (features,), len(features)

    def hear(self, *inputs: Tensor) -> Tensor:
        """See `Gemma4Towers.hear`."""
        rows: Tensor = self._loaded["audio"](inputs[0].to(*self.place))
        return rows
