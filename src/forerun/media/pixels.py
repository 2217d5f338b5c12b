"""Pictures as towers want them: made the right size, turned into numbers, cut into patches.

transformers' own processors of some families need torchvision; the steps are few, and the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.weights.config_reader import ConfigReader

if TYPE_CHECKING:
    from PIL.Image import Image

BYTE = 256  # levels of a colour
BICUBIC = 3  # as settings call the filter


def processor_levels(settings: ConfigReader, mean: float, std: float) -> Tensor:
    """What a processor makes of each level of each colour; one that does something else than `pixel_values` is refused.

    `mean` and `std` are what colours are shifted and divided by where the settings do not say.
    """
    settings.only("do_resize", True)
    settings.only("do_rescale", True)
    settings.only("resample", BICUBIC)
    scale = settings.number("rescale_factor", 1 / 255)
    if not settings.flag("do_normalize", True):
        return colour_levels(scale, [0.0] * 3, [1.0] * 3)
    means, stds = settings.values.get("image_mean") or [mean] * 3, settings.values.get("image_std") or [std] * 3
    for name, values in (("image_mean", means), ("image_std", stds)):
        if not isinstance(values, list) or len(values) != 3 or not all(type(value) in (int, float) for value in values):
            raise settings.wrong(name, "a list of three numbers")
    if not all(value > 0 for value in stds):
        raise settings.wrong("image_std", "a list of three numbers above 0")
    return colour_levels(scale, means, stds)


def colour_levels(scale: float, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """[3, 256] float32: what each level of red, green and blue becomes."""
    level = torch.arange(BYTE, dtype=torch.float64) * scale
    return torch.stack([(level - m) / s for m, s in zip(mean, std, strict=True)]).float()


def pixel_values(image: Image, height: int, width: int, levels: Tensor) -> Tensor:
    """[3, height, width] float32 of a picture that is made that large."""
    import numpy
    from PIL.Image import Resampling

    if image.size != (width, height):
        image = image.resize((width, height), Resampling.BICUBIC)
    colours = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)  # [3, height, width] of bytes
    return torch.stack([levels[channel][colours[channel].long()] for channel in range(3)])


def raster_patches(pixels: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Patches [n, side x side x 3] of [3, height, width] row by row, and where they stand: [n, 2] as (x, y)."""
    _, height, width = pixels.shape
    rows, columns = height // side, width // side
    patches = pixels.reshape(3, rows, side, columns, side).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return patches, torch.stack([x.reshape(-1), y.reshape(-1)], dim=1)


def size_within(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """The largest height and width in multiples of `side` that keep the proportions and make at most `most` squares.

    Of a very long picture one side becomes `side`, and proportions are lost. The height and width may be smaller than
    the picture's own or larger.
    """
    factor = math.sqrt(most * side * side / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * side, columns * side
