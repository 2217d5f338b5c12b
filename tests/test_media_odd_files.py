"""Files that are in order, but not of the plainest kind: what is seen and heard of them is what their makers meant."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import av
import numpy
import pytest
from media_files import encoded, film_file, part, picture
from PIL import Image
from test_media_files import LIMITS, frames_and_times, heard, recording, refused, wav

from forerun.media.decoding import read_image
from forerun.media.films import read_film
from forerun.media.sources import media_part

CAMERA_TURNS = {  # by what EXIF calls the turn: the way back
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def seen(data: bytes) -> Any:
    """[height, width, 3] of a picture's file."""
    image = read_image(part("image", data), LIMITS)
    assert image.mode == "RGB"
    return numpy.asarray(image)


def glass(mode: str) -> Image.Image:
    """A black square on nothing, its border half transparent."""
    image = Image.new("RGBA", (12, 12), (0, 0, 0, 0))
    image.paste((0, 0, 0, 128), (3, 3, 9, 9))
    image.paste((0, 0, 0, 255), (4, 4, 8, 8))
    return image if mode == "RGBA" else image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("P", "PNG"), ("P", "GIF")]
)
def test_what_shines_through_is_white_as_in_transformers(mode: str, kind: str) -> None:
    if mode == "P":
        image = Image.new("P", (12, 12), 3)
        image.putpalette([0, 0, 0] * 256)
        image.paste(4, (4, 4, 8, 8))
        data = encoded(image, kind, transparency=3)
    else:
        data = encoded(glass(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))
    found = seen(data)
    assert found[0, 0].tolist() == [255, 255, 255] and found[6, 6].tolist() == [0, 0, 0]
    over = Image.open(io.BytesIO(data)).convert("RGBA")
    paper = Image.new("RGBA", over.size, "white")
    assert numpy.array_equal(found, numpy.asarray(Image.alpha_composite(paper, over).convert("RGB")))


def png16(kind: int, *pixels: tuple[int, ...]) -> bytes:
    """One row of pixels with 16 bits a value; `kind`: 0 grey, 2 colours, 4 grey and alpha, 6 colours and alpha."""

    def block(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", len(pixels), 1, 16, kind, 0, 0, 0)
    row = b"".join(struct.pack(">H", value) for pixel in pixels for value in pixel)
    return (
        b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(b"\0" + row)) + block(b"IEND", b"")
    )


def test_sixteen_bits_are_as_bright_as_eight() -> None:
    levels = (0, 0x4000, 0x8000, 0xFFFF)
    assert seen(png16(0, *((level,) for level in levels)))[0, :, 0].tolist() == [0, 64, 128, 255]
    assert seen(png16(2, *((level, 0, 0xFFFF) for level in levels)))[0, :, 0].tolist() == [0, 64, 128, 255]
    assert seen(png16(4, *((level, 0xFFFF) for level in levels)))[0, :, 0].tolist() == [0, 64, 128, 255]
    assert seen(png16(6, (0, 0, 0, 0xFFFF), (0, 0, 0, 0)))[0, :, 0].tolist() == [0, 255]


def test_pictures_of_pillows_look_like_their_files() -> None:
    grey = numpy.array([[0, 0x4000, 0xFFFF]], dtype=numpy.uint16)
    for image, expected in (
        (Image.fromarray(grey), [0, 64, 255]),  # I;16
        (Image.fromarray(numpy.array([[0, 64, 255]], dtype=numpy.int32)), [0, 64, 255]),  # I, as Pillow shows it
        (Image.fromarray(numpy.array([[0, 64, 255]], dtype=numpy.float32)), [0, 64, 255]),  # F
        (Image.new("RGBa", (3, 1)), [255, 255, 255]),
        (Image.new("RGBA", (3, 1)), [255, 255, 255]),
    ):
        given = media_part("image", image)
        assert numpy.asarray(read_image(given, LIMITS))[0, :, 0].tolist() == expected, image.mode


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_all_ways_to_hold_a_camera(kind: str) -> None:
    for number in range(10):  # 0 and 9 mean nothing
        exif = Image.Exif()
        exif[0x0112] = number
        options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
        data = encoded(picture(40, 24), kind, exif=exif, **options)
        expected = picture(40, 24).transpose(CAMERA_TURNS[number]) if number in CAMERA_TURNS else picture(40, 24)
        found = seen(data)
        assert found.shape == numpy.asarray(expected).shape
        assert numpy.abs(found.astype(int) - numpy.asarray(expected)).mean() < 5, number


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "exif", [b"nonsense", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*\xff\xff"]
)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_picture_is_not_damaged_when_only_its_remarks_are(kind: str, exif: bytes) -> None:
    data = encoded(picture(40, 20), kind, exif=exif)
    assert seen(data).shape == (20, 40, 3)
    assert seen(media_part("image", Image.open(io.BytesIO(data))).data).shape == (20, 40, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_of_whatever_moves_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert seen(data)[3, 3].tolist() == [255, 0, 0]


def tone(seconds: float = 0.25, rate: int = 16_000, level: float = 0.5) -> Any:
    return numpy.sin(numpy.arange(int(seconds * rate)) * 2 * numpy.pi * 440 / rate) * level


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6, 8, 16])
def test_many_channels_are_as_loud_as_one(channels: int) -> None:
    """Their mean, as in transformers; ffmpeg itself would add them up."""
    samples = (tone() * 32767).astype("<i2")
    alike = numpy.repeat(samples[:, None], channels, axis=1)
    expected = samples.astype(numpy.float32) / 32768
    numpy.testing.assert_allclose(heard(wav(alike.tobytes(), channels=channels)), expected, atol=1e-6)
    alone = alike.copy()
    alone[:, 1:] = 0
    numpy.testing.assert_allclose(heard(wav(alone.tobytes(), channels=channels)), expected / channels, atol=1e-6)


@pytest.mark.parametrize("rate", [4_000, 11_025, 15_999, 44_100, 48_000, 384_000])
def test_any_rate_becomes_the_models_own(rate: int) -> None:
    sound = heard(wav((tone(0.5, rate) * 32767).astype("<i2").tobytes(), rate=rate))
    assert abs(len(sound) - 8000) <= 16
    middle = slice(1000, 7000)  # filters swing in and out
    numpy.testing.assert_allclose(sound[middle], tone(0.5)[: len(sound)][middle], atol=0.02)


def with_cover(kind: str, codec: str) -> bytes:
    """A recording that has a picture of its cover, as players show it."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        cover: Any = container.add_stream("mjpeg")
        cover.width, cover.height, cover.pix_fmt = 60, 40, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        stream: Any = container.add_stream(codec, rate=44100, layout="stereo")
        for packet in cover.encode(av.VideoFrame.from_image(picture())):
            container.mux(packet)
        samples = numpy.stack([tone(rate=44100)] * 2).astype(numpy.float32)
        resampler = av.AudioResampler(stream.format, stream.layout, 44100, frame_size=stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = 44100
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_a_cover_is_no_film() -> None:
    covered = with_cover("mp3", "libmp3lame")
    assert len(heard(covered)) > 3000
    refused(
        part("video", covered),
        "holds no film",
        lambda it: read_film(it, LIMITS, lambda *_: [0], lambda image, _: image),
    )


def test_films_of_one_frame_and_recordings_without_any() -> None:
    frames, times = frames_and_times(film_file([picture()]))
    assert [frame.size for frame in frames] == [(60, 40)] and times == [0.0]
    sound = recording(tone(1.0, 44100), 44100, "mp4", "aac")
    refused(part("video", sound), "holds no film", lambda it: frames_and_times(it.data))


def test_silence_that_encoders_add_makes_nothing_too_long() -> None:
    """An MP3 of two seconds holds some hundredths more; transformers would cut it as well."""
    for kind, codec in (("mp3", "libmp3lame"), ("mp4", "aac"), ("ogg", "libopus")):
        rate = 48_000 if codec == "libopus" else 44_100
        assert len(heard(recording(tone(2.0, rate), rate, kind, codec), seconds=2.0)) <= 32_000
    assert len(heard(wav((tone(2.09) * 32767).astype("<i2").tobytes()), seconds=2.0)) == 32_000
    longer = wav((tone(2.11) * 32767).astype("<i2").tobytes())
    refused(part("audio", longer), "longer than 2 seconds", lambda it: heard(it.data, seconds=2.0))
