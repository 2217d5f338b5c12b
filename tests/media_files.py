"""Files that models are shown in tests: pictures, films and recordings."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy
from PIL import Image

from forerun.media.parts import Kind, MediaPart


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """Coarse noise, so that resizing shows."""
    colours = numpy.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=numpy.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def film_file(images: list[Image.Image], rate: int = 2, kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    """The bytes of a film's file."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *images[0].size, "yuv420p"
        stream.bit_rate = 2_000_000
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode(None))
    return file.getvalue()


def sound_file(seconds: float = 0.5, rate: int = 16_000, seed: int = 0) -> bytes:
    """The bytes of a WAV file."""
    noise = numpy.random.default_rng(seed).normal(0, 3000, int(seconds * rate)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes(noise.tobytes())
    return file.getvalue()


def part(kind: Kind, data: bytes, name: str = "a.file") -> MediaPart:
    """A file that came with a prompt."""
    return MediaPart(kind, data, name)
