"""Pictures: from bytes that nobody has looked into yet to pixels, never more of them than the limits say.

Messages name the part and never what the decoder said: those texts have been known to hold addresses in memory.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from forerun.errors import ForerunError
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaPart

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = "a picture in PNG, JPEG, WebP, GIF or BMP format"


def read_image(part: MediaPart, limits: MediaLimits) -> Image:
    """The picture in RGB, turned as its camera says; of a moving one the first frame."""
    from PIL import Image

    check_bytes(part, limits.file_bytes)
    kind = picture_format(part.data)
    if kind is None:
        raise ForerunError(f"{part.name} is not {PICTURES}")
    try:
        image = Image.open(io.BytesIO(part.data), formats=[kind])  # reads the header only
        width, height = image.size
        check_pixels(part, width, height, limits.image_pixels)
        image.load()
        return in_colour(upright(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # a limit of its own, far above
        raise ForerunError(f"{part.name} has more than {limits.image_pixels} pixels: make it smaller") from error
    except (ForerunError, MemoryError):  # limits were kept: what there was no room for is not the file's fault
        raise
    except Exception as error:  # decoders fail in every way there is
        raise ForerunError(f"{part.name} is truncated or damaged: it cannot be read as {kind}") from error


def upright(image: Image) -> Image:
    """As its camera was held; a picture whose remarks about that are damaged is not."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - see above: the pixels themselves have been read
        return image


def in_colour(image: Image) -> Image:
    """In RGB; what shines through is white, as in transformers."""
    import numpy
    from PIL import Image

    if image.mode.startswith("I"):  # grey of 16 bits: Pillow would make everything white that is not nearly black
        image = Image.fromarray((numpy.asarray(image) >> 8).clip(0, 255).astype(numpy.uint8))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):  # as in most screenshots: nothing more to do, nor to hold
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def picture_format(data: bytes) -> str | None:
    """By how it begins, whatever its name says."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "BMP" if data.startswith(b"BM") else None


def check_bytes(part: MediaPart, most: int) -> None:
    """Is the file empty or too large?"""
    if not part.data:
        raise ForerunError(f"{part.name} is empty")
    if len(part.data) > most:
        raise too_large(part.name, most)


def too_large(name: str, most: int) -> ForerunError:
    """The error about a file of more bytes."""
    return ForerunError(f"{name} is larger than {most / 2**20:g} MiB; give a smaller file")


def check_pixels(part: MediaPart, width: int, height: int, most: int) -> None:
    """Does a header announce more pixels than may be decoded, or none?"""
    if width < 1 or height < 1:
        raise ForerunError(f"{part.name} has no pixels")
    if width * height > most:
        raise ForerunError(f"{part.name} has {width} x {height} pixels, more than {most}: make it smaller")
