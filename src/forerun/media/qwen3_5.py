"""Media of `qwen3_5` and `qwen3_5_moe`: one tower for pictures and films; positions count time, height and width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.media.decoding import read_image
from forerun.media.expansion import Prepared, TokenList
from forerun.media.films import read_film
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaPart
from forerun.media.pixels import pixel_values, processor_levels
from forerun.media.towers import load_tower, processor_settings
from forerun.models.qwen3_5 import MEDIA
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.config_reader import ConfigReader

if TYPE_CHECKING:
    from PIL.Image import Image

TENSORS: Mapping[Kind, tuple[str, ...]] = {"image": ("visual.",)}  # how the names of those begin that a kind needs
NARROWEST = 200  # times as long as high, or as high as long
MOST_PIXELS = 1 << 28  # that settings may ask for


@dataclass(frozen=True, slots=True)
class PatchShape:
    """How the tower cuts pictures."""

    patch: int  # pixels of a side
    merge: int  # patches of a side that become one row
    together: int  # frames that become one

    @property
    def side(self) -> int:
        """Pixels of a side of what becomes one row."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class QwenVisionSettings:
    """How a processor prepares pictures or films."""

    least: int  # pixels, of all frames together
    most: int
    levels: Tensor  # [3, 256]

    @classmethod
    def read(cls, settings: ConfigReader, shape: PatchShape, least: int, most: int) -> QwenVisionSettings:
        """From a processor's settings, which must cut as the tower does; `least` and `most` are the usual ones."""
        for name, value in (("patch_size", shape.patch), ("merge_size", shape.merge)):
            settings.only(name, value)
        settings.only("temporal_patch_size", shape.together)
        size = settings.part("size")
        least = size.integer("shortest_edge", settings.integer("min_pixels", least), high=MOST_PIXELS)
        most = size.integer("longest_edge", settings.integer("max_pixels", most, high=MOST_PIXELS), high=MOST_PIXELS)
        return cls(least, most, processor_levels(settings, 0.5, 0.5))


class QwenMedia:
    """A `Family`."""

    kinds: frozenset[Kind] = frozenset(("image", "video"))

    def __init__(self, checkpoint: Checkpoint, tokenizer: Any, device: torch.device, dtype: torch.dtype) -> None:
        config = checkpoint.reader
        self._ids = {name: config.integer(name, usual, low=0) for name, usual in MEDIA.items()}
        self._checkpoint, self._tokenizer, self._device, self._dtype = checkpoint, tokenizer, device, dtype
        self._tower: Any = None
        self.placeholders: Mapping[int, Kind] = {
            self._ids["image_token_id"]: "image",
            self._ids["video_token_id"]: "video",
        }

    @property
    def _shape(self) -> PatchShape:
        vision = self._checkpoint.reader.part("vision_config")
        return PatchShape(
            vision.integer("patch_size", 16, high=64),
            vision.integer("spatial_merge_size", 2, high=16),
            vision.integer("temporal_patch_size", 2, high=16),
        )

    def prepare(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        """See `Family.prepare`."""
        return (self._image if part.kind == "image" else self._film)(part, limits)

    def load(self, kind: Kind) -> None:  # noqa: ARG002
        """See `Family.load`."""
        if self._tower is not None:
            return
        import transformers
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

        if self._checkpoint.config["model_type"] == "qwen3_5_moe":
            classes = transformers.Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel
        else:
            classes = transformers.Qwen3_5VisionConfig, Qwen3_5VisionModel
        self._tower = load_tower(self._checkpoint, "vision_config", classes, "visual", self._device, self._dtype)

    def encode(self, prepared: Prepared) -> Tensor:
        """See `Family.encode`."""
        patches, grid = prepared.inputs
        inputs = patches.to(self._device, self._dtype)
        rows: Tensor = self._tower(inputs, grid_thw=torch.tensor([grid], device=self._device)).pooler_output
        return rows

    def whole(self, kind: Kind) -> bool:  # noqa: ARG002
        """No row sees a later one."""
        return False

    def positions(self, tokens: int, stretches: Sequence[tuple[int, tuple[int, int]]]) -> Tensor:
        """A picture stands at one time, in a square as large as its longer side, and what follows comes after that."""
        parts, past, place = [], 0, 0
        for start, (height, width) in stretches:
            parts.append(torch.arange(place, place + start - past).expand(3, -1))
            place += start - past
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            parts.append(place + torch.stack([torch.zeros_like(y), y, x]).reshape(3, -1))
            place += max(height, width)
            past = start + height * width
        parts.append(torch.arange(place, place + tokens - past).expand(3, -1))
        # Whatever comes after the prompt stands at its index.
        return torch.cat(parts, dim=1) + tokens - (place + tokens - past)

    def _image(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        shape = self._shape
        vision = QwenVisionSettings.read(
            processor_settings(self._checkpoint, "image_processor"), shape, 1 << 16, 1 << 24
        )
        image = read_image(part, limits)
        height, width = fitted(part, image, 1, 1, shape.side, vision)
        pixels = pixel_values(image, height, width, vision.levels)
        patches = block_patches([pixels] * shape.together, shape)
        tokens = TokenList()
        grid = height // shape.side, width // shape.side
        tokens.stretch([], self._ids["image_token_id"], grid[0] * grid[1], [], grid=grid)
        inputs = patches, (1, height // shape.patch, width // shape.patch)
        return Prepared("image", tokens.tokens, tokens.stretches, inputs)

    def _film(self, part: MediaPart, limits: MediaLimits) -> Prepared:
        """Frames two by two, each pair with its seconds before it, all inside the borders that the template wrote."""
        shape, settings = self._shape, processor_settings(self._checkpoint, "video_processor")
        vision = QwenVisionSettings.read(settings, shape, 1 << 12, 25_165_824)
        settings.only("cap_pixels_per_frame", False)
        speed = settings.number("fps", 2.0, high=1000.0)
        few, many = settings.integer("min_frames", 4), settings.integer("max_frames", 768, high=4096)

        def choose(total: int, rate: float) -> list[int]:
            count = min(max(int(total / rate * speed), few), many, total)
            step = (total - 1) / max(1, count - 1)
            return [round(index * step) for index in range(count)]

        def keep(image: Image, count: int) -> Tensor:
            height, width = fitted(part, image, max(count, shape.together), shape.together, shape.side, vision)
            return pixel_values(image, height, width, vision.levels)

        film = read_film(part, limits, choose, keep)
        missing = -len(film.frames) % shape.together
        frames, times = film.frames + film.frames[-1:] * missing, film.times + film.times[-1:] * missing
        height, width = frames[0].shape[1:]
        grid = height // shape.side, width // shape.side
        tokens, start, stop = TokenList(), self._ids["vision_start_token_id"], self._ids["vision_end_token_id"]
        patches = []
        for first in range(0, len(frames), shape.together):
            patches.append(block_patches(frames[first : first + shape.together], shape))
            stamp = f"<{(times[first] + times[first + shape.together - 1]) / 2:.1f} seconds>"
            before = [*self._tokenizer.encode(stamp, add_special_tokens=False), start]
            tokens.stretch(before, self._ids["video_token_id"], grid[0] * grid[1], [stop], grid=grid)
        inputs = torch.cat(patches), (len(patches), height // shape.patch, width // shape.patch)
        return Prepared("video", tokens.tokens, tokens.stretches, inputs)


def fitted(
    part: MediaPart, image: Image, frames: int, together: int, side: int, vision: QwenVisionSettings
) -> tuple[int, int]:
    """Height and width in multiples of `side`, with about as many pixels as `vision` wants in all frames."""
    height, width = image.height, image.width
    if frames > 1 and min(height, width) < side:  # small films are made larger first
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > NARROWEST * min(height, width):
        raise ForerunError(f"{part.name} is more than {NARROWEST} times as long as high, or as high as long: cut it")
    rounded = round(height / side) * side, round(width / side) * side
    pixels = round(frames / together) * together * rounded[0] * rounded[1]
    if pixels > vision.most:
        factor = math.sqrt(frames * height * width / vision.most)
        return max(side, math.floor(height / factor / side) * side), max(side, math.floor(width / factor / side) * side)
    if pixels < vision.least:
        factor = math.sqrt(vision.least / (frames * height * width))
        return math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
    return rounded


def block_patches(frames: Sequence[Tensor], shape: PatchShape) -> Tensor:
    """[n, 3 x frames x patch x patch] of frames [3, height, width]: those that become one row follow each other."""
    pixels = torch.stack(list(frames), dim=1)  # [3, frames, height, width]
    _, count, height, width = pixels.shape
    blocks = pixels.reshape(
        3, count, height // shape.side, shape.merge, shape.patch, width // shape.side, shape.merge, shape.patch
    )
    # [rows, columns, merge, merge, 3, frames, patch, patch]
    return blocks.permute(2, 5, 3, 6, 0, 1, 4, 7).reshape(height * width // shape.patch**2, -1)
