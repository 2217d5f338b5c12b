"""Media of `gemma4` and `gemma4_unified`: pictures, frames of films, and sound where the model has ears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.media.decoding import read_image
from forerun.media.expansion import Prepared, TokenList
from forerun.media.films import read_film
from forerun.media.gemma4_towers import Gemma4Towers
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaPart
from forerun.media.pixels import pixel_values, processor_levels, raster_patches, size_within
from forerun.media.sounds import RATE, read_sound
from forerun.media.towers import processor_settings
from forerun.models.gemma4 import is_unified, media_tokens
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader

if TYPE_CHECKING:
    from PIL.Image import Image

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # budgets of a picture that models are trained for
HEARD = 30.0  # seconds of sound that the models are trained for


@dataclass(frozen=True, slots=True)
class GemmaVisionSettings:
    """How pictures are prepared."""

    soft_tokens: int  # at most, of each
    side: int  # pixels of a side of what becomes one row
    levels: Tensor  # [3, 256]

    @classmethod
    def read(cls, settings: ConfigReader, usual: int, side: int) -> GemmaVisionSettings:
        """From a processor's settings; `usual` soft tokens."""
        soft_tokens = settings.integer("max_soft_tokens", usual)
        if soft_tokens not in SOFT_TOKENS:
            raise settings.wrong("max_soft_tokens", "70, 140, 280, 560 or 1120")
        return cls(soft_tokens, side, processor_levels(settings, 0.0, 1.0))


class GemmaMedia:
    """A `Family`."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Any, towers: Gemma4Towers, kinds: frozenset[Kind]) -> None:
        config = checkpoint.reader
        ids = media_tokens(config)
        self._ids, self._tokenizer, self._towers, self._checkpoint = ids, tokenizer, towers, checkpoint
        usual = "vision" if is_unified(config) else None
        self._bidirectional = config.text_model().values.get("use_bidirectional_attention", usual) == "vision"
        self.kinds = kinds
        self.placeholders: Mapping[int, Kind] = {
            ids["image_token_id"]: "image",
            ids["video_token_id"]: "video",
            ids["audio_token_id"]: "audio",
        }

    def prepare(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        """See `Family.prepare`."""
        return {"image": self._image, "video": self._film, "audio": self._sound}[part.kind](part, limits)

    def load(self, kind: Kind) -> None:
        """See `Family.load`."""
        self._towers.load(kind)

    def encode(self, prepared: Prepared) -> Tensor:
        """See `Family.encode`."""
        return (self._towers.hear if prepared.kind == "audio" else self._towers.see)(*prepared.inputs)

    def whole(self, kind: Kind) -> bool:
        """Pictures see themselves whole in models that were trained so; sound never does."""
        return self._bidirectional and kind != "audio"

    def positions(self, tokens: int, stretches: Sequence[tuple[int, tuple[int, int]]]) -> None:
        """Media stand in a row with the text."""

    def _vision_settings(self, name: str, usual: int) -> GemmaVisionSettings:
        settings = processor_settings(self._checkpoint, name)
        vision = self._checkpoint.reader.part("vision_config")
        patch, pooled = vision.integer("patch_size", 16, high=64), vision.integer("pooling_kernel_size", 3, high=16)
        settings.only("patch_size", patch)
        settings.only("pooling_kernel_size", pooled)
        return GemmaVisionSettings.read(settings, usual, patch * pooled)

    def _patches(self, image: Image, vision: GemmaVisionSettings, part: MediaPart) -> tuple[Tensor, Tensor]:
        height, width = size_within(image.height, image.width, vision.side, vision.soft_tokens)
        if max(height, width) > self._towers.places * self._towers.patch:
            raise ForerunError(f"{part.name} is too long for its height: cut it")
        return raster_patches(pixel_values(image, height, width, vision.levels), self._towers.patch)

    def _image(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        vision = self._vision_settings("image_processor", 280)
        patches, positions = self._patches(read_image(part, limits), vision, part)
        tokens, ids = TokenList(), self._ids
        rows = len(patches) * self._towers.patch**2 // vision.side**2
        tokens.stretch([ids["boi_token_id"]], ids["image_token_id"], rows, [ids["eoi_token_id"]])
        return Prepared("image", tokens.tokens, tokens.stretches, (patches[None], positions[None]))

    def _film(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        """A few frames, each with its minute and second before it."""
        vision = self._vision_settings("video_processor", 70)
        frames = processor_settings(self._checkpoint, "video_processor").integer("num_frames", 32, high=1024)

        def choose(total: int, rate: float) -> list[int]:  # noqa: ARG001
            count = min(frames, total)
            return [index * total // count for index in range(count)]

        film = read_film(part, limits, choose, lambda image, _: self._patches(image, vision, part))
        tokens, ids = TokenList(), self._ids
        for number, (time, (patches, _)) in enumerate(zip(film.times, film.frames, strict=True)):
            stamp = f"{' ' if number else ''}{int(time // 60):02d}:{int(time % 60):02d} "
            before = [*self._tokenizer.encode(stamp, add_special_tokens=False), ids["boi_token_id"]]
            rows = len(patches) * self._towers.patch**2 // vision.side**2
            tokens.stretch(before, ids["video_token_id"], rows, [ids["eoi_token_id"]])
        inputs = tuple(torch.stack(each) for each in zip(*film.frames, strict=True))
        return Prepared("video", tokens.tokens, tokens.stretches, inputs)

    def _sound(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        sound = read_sound(part, limits, HEARD)
        inputs, rows = self._towers.listen(sound)
        if not rows:
            raise ForerunError(f"{part.name} is too short: {len(sound) / RATE:.3f} seconds are less than one token")
        tokens, ids = TokenList(), self._ids
        tokens.stretch([ids["boa_token_id"]], ids["audio_token_id"], rows, [ids["eoa_token_index"]])
        return Prepared("audio", tokens.tokens, tokens.stretches, inputs)
