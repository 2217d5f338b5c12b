"""Files of strangers: what is read of them, what is refused, and that refusing costs nothing."""

from __future__ import annotations

import io
import resource
import struct
import wave
import zlib
from typing import Any

import av
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import encoded, film_file, part, picture, sound_file
from PIL import Image

from forerun.errors import ForerunError
from forerun.media.decoding import read_image
from forerun.media.films import read_film
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaPart
from forerun.media.sounds import RATE, read_sound

LIMITS = MediaLimits()
MEMORY = 64 << 10  # KiB that refusing anything may take at most


def png(width: int, height: int) -> bytes:
    """A file whose header announces a size, with hardly any data."""

    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", data) + block(b"IEND", b"")


def jpeg_of(width: int, height: int) -> bytes:
    """A photograph whose header was given another size."""
    data = bytearray(encoded(picture(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_of(width: int, height: int) -> bytes:
    """A moving picture whose header was given another size."""
    data = encoded(picture(), "GIF")
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


def frames_and_times(data: bytes, limits: MediaLimits = LIMITS, most: int = 4) -> tuple[list[Any], list[float]]:
    """The first frames of a film."""
    film = read_film(part("video", data), limits, lambda total, _: range(min(most, total)), lambda image, _: image)
    return film.frames, film.times


def wav(
    samples: bytes, *, rate: int = RATE, channels: int = 1, bits: int = 16, form: int = 1, claim: int = -1
) -> bytes:
    """A recording whose header says what it is told to."""
    size = len(samples) if claim < 0 else claim
    frame = channels * bits // 8
    header = struct.pack("<HHIIHH", form, channels, rate, rate * frame & 0xFFFFFFFF, frame & 0xFFFF, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", size) + samples
    return b"RIFF" + struct.pack("<I", min(len(body), 0xFFFFFFFF)) + body


def heard(data: bytes, seconds: float = 30.0, limits: MediaLimits = LIMITS) -> Any:
    return read_sound(part("audio", data), limits, seconds)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pictures_of_every_format(kind: str) -> None:
    image = read_image(part("image", encoded(picture(40, 30), kind)), LIMITS)
    assert (image.mode, image.size) == ("RGB", (40, 30))
    difference = numpy.asarray(image).astype(int) - numpy.asarray(picture(40, 30))
    assert numpy.abs(difference).mean() < (0.1 if kind in ("PNG", "BMP") else 30)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_pictures_in_every_mode(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(Image.new(mode, (9, 7)) if mode == "I;16" else picture(9, 7).convert(mode), kind)
    assert read_image(part("image", data), LIMITS).mode == "RGB"


def test_pictures_are_turned_as_the_camera_was() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera stood on its side
    image = read_image(part("image", encoded(picture(40, 20), "JPEG", exif=exif)), LIMITS)
    assert image.size == (20, 40)


def test_of_moving_pictures_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read_image(part("image", data), LIMITS).getpixel((3, 3)) == (255, 0, 0)


BAD_PICTURES = {
    "60000 x 60000": (png(60000, 60000), "more than 50000000 pixels"),
    "10000 x 8000": (png(10000, 8000), "10000 x 8000 pixels, more than 50000000"),
    "no pixels": (png(0, 9), ""),
    "a photograph of 65500 x 65500": (jpeg_of(65500, 65500), "more than 50000000 pixels"),
    "truncated photograph": (encoded(picture(200, 200), "JPEG")[:900], "truncated or damaged"),
    "truncated png": (encoded(picture(200, 200))[:300], "truncated or damaged"),
    "too little data": (png(500, 500), "truncated or damaged"),
    "moving picture of 65535 x 65535": (gif_of(65535, 65535), "more than 50000000 pixels"),
    "text": (b"I am a text, whatever my name says", "not a picture in PNG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture in PNG"),
    "tiff": (encoded(picture(), "TIFF"), "not a picture in PNG"),
    "film": (film_file([picture(32, 32)]), "not a picture in PNG"),
    "nothing": (b"", "is empty"),
    "beginning of a png": (b"\x89PNG\r\n\x1a\n", "truncated or damaged"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bad_pictures_are_one_line(name: str) -> None:
    data, message = BAD_PICTURES[name]
    refused(MediaPart("image", data, "mine.png"), message, lambda it: read_image(it, LIMITS))


def refused(it: MediaPart, message: str, read: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ForerunError) as caught:
        read(it)
    assert it.name in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value) and " at 0x" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def test_limits_of_pictures() -> None:
    data = encoded(picture(40, 30))
    assert read_image(part("image", data), MediaLimits(image_pixels=1200)).size == (40, 30)
    refused(part("image", data), "40 x 30 pixels", lambda it: read_image(it, MediaLimits(image_pixels=1199)))
    refused(part("image", data), "MiB", lambda it: read_image(it, MediaLimits(file_bytes=len(data) - 1)))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx"), ("matroska", "libvpx-vp9"), ("avi", "mpeg4")],
)
def test_films_of_every_format(kind: str, codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip("this build of PyAV cannot write it")
    shades = [Image.new("RGB", (64, 48), (level, level, level)) for level in (20, 90, 160, 230)]
    frames, times = frames_and_times(film_file(shades, 4, kind, codec))
    assert [round(numpy.asarray(frame).mean(), -1) for frame in frames] == [20, 90, 160, 230]
    assert times == [0, 0.25, 0.5, 0.75]


FILM = film_file([picture(64, 48, seed) for seed in range(12)], rate=4)
LARGE = film_file([picture(640, 480)])
WEBM = film_file([picture(64, 48, seed) for seed in range(3)], 4, "webm", "libvpx")
BAD_FILMS = {
    "frames": (FILM, MediaLimits(video_frames=11), "more than 11 frames"),
    "seconds": (FILM, MediaLimits(video_seconds=2), "longer than 2 seconds"),
    "pixels": (FILM, MediaLimits(frame_pixels=3000), "64 x 48 pixels, more than 3000"),
    "very many pixels": (LARGE, MediaLimits(frame_pixels=3000), "more than 3000"),
    "pixels of a container that names them": (WEBM, MediaLimits(frame_pixels=3000), "64 x 48 pixels, more than 3000"),
    "pixels of all frames": (
        FILM,
        MediaLimits(video_pixels=12 * 64 * 48 - 1),
        "pixels in all its frames",
    ),
    "bytes": (FILM, MediaLimits(file_bytes=900), "MiB"),
    "truncated": (FILM[:900], LIMITS, "truncated or damaged"),
    "picture": (encoded(picture()), LIMITS, "not a film in MP4"),
    "sound": (sound_file(), LIMITS, "holds no film"),
    "a list of files": (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", LIMITS, "not a film in MP4"),
    "another list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", LIMITS, "not a film in MP4"),
    "text": (b"\x00\x00\x00\x18ftyp and then only text" * 20, LIMITS, "truncated or damaged"),
    "nothing": (b"", LIMITS, "is empty"),
}


def whole_film(it: MediaPart, limits: MediaLimits) -> None:
    read_film(it, limits, lambda total, _: range(total), lambda image, _: image)


@pytest.mark.parametrize("name", BAD_FILMS)
def test_bad_films_are_one_line(name: str) -> None:
    data, limits, message = BAD_FILMS[name]
    refused(MediaPart("video", data, "mine.mp4"), message, lambda it: whole_film(it, limits))


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx")])
def test_frames_that_turn_out_too_large_are_never_decoded(
    kind: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may say less than their frames are: the decoder knows the limit itself."""
    data = film_file([picture(640, 480)] * 2, 4, kind, codec)
    exact = MediaLimits(frame_pixels=640 * 480)
    assert len(frames_and_times(data, exact)[0]) == 2
    monkeypatch.setattr("forerun.media.films.check_pixels", lambda *_: None)
    monkeypatch.setattr("forerun.media.films.measure", lambda *_: (2, 4.0))
    small = MediaLimits(frame_pixels=64 * 48)
    refused(part("video", data), "truncated or damaged", lambda it: frames_and_times(it.data, small))


def test_a_film_whose_frames_change_their_size_is_one_line() -> None:
    """Towers get all frames in one piece; and the first frame's size is what the limit of the whole was counted by."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number, size in enumerate([(64, 48), (64, 48), (48, 64), (64, 48)]):
            packet = av.Packet(encoded(picture(*size), "JPEG"))
            packet.stream, packet.pts, packet.dts = stream, number * 250, number * 250
            container.mux(packet)
    for wanted in ([0, 1, 2, 3], [0, 3]):
        said = "its frames are not all of one size"
        refused(part("video", file.getvalue()), said, lambda it: read_film(it, LIMITS, lambda *_: wanted, lambda *_: 1))  # noqa: B023


def test_films_are_turned_as_the_camera_was() -> None:
    half = Image.new("RGB", (64, 48))
    half.paste((255, 255, 255), (0, 0, 64, 24))  # white above
    data = bytearray(film_file([half] * 2))
    matrix = data.index(b"tkhd") + 44
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    frame = frames_and_times(bytes(data))[0][0]
    assert frame.size == (48, 64)
    assert frame.getpixel((5, 30)) < (50, 50, 50) and frame.getpixel((42, 30)) > (200, 200, 200)


def test_no_more_frames_are_decoded_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.media import films

    kept: list[int] = []
    monkeypatch.setattr(films, "upright", lambda frame: kept.append(1) or frame.to_image())  # type: ignore[func-returns-value]
    film = read_film(
        part("video", FILM), LIMITS, lambda total, _: [0, 5, total - 1], lambda image, count: (image.size, count)
    )
    assert film.frames == [((64, 48), 3)] * 3 and len(kept) == 3


def test_recordings_of_every_format() -> None:
    tone = numpy.sin(numpy.arange(44100) * 2 * numpy.pi * 1000 / 44100)
    for kind, codec in (
        ("wav", "pcm_s16le"),
        ("flac", "flac"),
        ("mp3", "libmp3lame"),
        ("mp4", "aac"),
        ("ogg", "libopus"),
        ("adts", "aac"),
    ):
        if codec not in av.codecs_available:
            continue
        sound = heard(recording(tone, 48000 if codec == "libopus" else 44100, kind, codec))
        assert sound.dtype == numpy.float32 and sound.ndim == 1
        strongest = numpy.abs(numpy.fft.rfft(sound)).argmax() * RATE / len(sound)
        expected = 1000 * (48000 / 44100 if codec == "libopus" else 1)
        assert abs(strongest - expected) < 15, kind


def recording(tone: Any, rate: int, kind: str, codec: str) -> bytes:
    """Two channels, the same tone in both."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="stereo")
        resampler = av.AudioResampler(stream.format, stream.layout, rate, frame_size=stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(
            numpy.stack([tone, tone]).astype(numpy.float32), format="fltp", layout="stereo"
        )
        frame.sample_rate = rate
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_samples_come_as_they_are() -> None:
    samples = numpy.arange(-3000, 3000, 7, dtype="<i2")
    assert numpy.array_equal(heard(wav(samples.tobytes())), samples.astype(numpy.float32) / 32768)


NOISE = bytes(range(256)) * 50
BAD_SOUNDS = {
    "no samples": (wav(b""), "holds no sound"),
    "only a header": (wav(NOISE)[:44], "holds no sound"),
    "half a header": (wav(NOISE)[:20], "truncated or damaged"),
    "one sample a second": (wav(NOISE, rate=1), "1 samples a second"),
    "very many a second": (wav(NOISE, rate=4_000_000), "samples a second"),
    "too many channels": (wav(NOISE, channels=200), "200 channels"),
    "not numbers": (wav(numpy.full(4000, numpy.nan, "<f4").tobytes(), bits=32, form=3), "not numbers"),
    "too long": (sound_file(31.0), "longer than 30 seconds"),
    "picture": (encoded(picture()), "not a recording in WAV"),
    "film without sound": (FILM, "holds no sound"),
    "text": (b"I am a text", "not a recording in WAV"),
    "a list of files": (b"#EXTM3U\n/etc/passwd\n", "not a recording in WAV"),
    "nothing": (b"", "is empty"),
}


@pytest.mark.parametrize("name", BAD_SOUNDS)
def test_bad_recordings_are_one_line(name: str) -> None:
    data, message = BAD_SOUNDS[name]
    refused(MediaPart("audio", data, "mine.wav"), message, lambda it: read_sound(it, LIMITS, 30.0))


@pytest.mark.parametrize("claim", [0, 10, 1 << 20, 0xFFFFFFFF])
def test_a_header_that_lies_about_its_length_decides_nothing(claim: int) -> None:
    data = wav(NOISE, claim=claim)
    try:
        assert len(heard(data)) <= len(NOISE) // 2
    except ForerunError as error:
        assert claim in (0, 10) and "a.file" in str(error)


def test_decoding_stops_at_the_limit() -> None:
    """Four minutes of silence in a few kilobytes."""
    silence = numpy.zeros(16000 * 240, numpy.float32)
    file = recording(silence, 16000, "flac", "flac")
    refused(part("audio", file), "longer than 2 seconds", lambda it: read_sound(it, LIMITS, 2.0))
    refused(part("audio", file), "longer than 3 seconds", lambda it: read_sound(it, MediaLimits(audio_seconds=3), 30.0))


def test_wave_reads_what_the_tests_write() -> None:
    with wave.open(io.BytesIO(wav(NOISE))) as file:
        assert file.getnframes() == len(NOISE) // 2


PICTURES = [encoded(picture(24, 18), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
SOUNDS = [wav(NOISE[:3000]), recording(numpy.sin(numpy.arange(4000) / 9), 16000, "flac", "flac")]
SMALL = MediaLimits(image_pixels=100_000, frame_pixels=100_000, video_frames=100, audio_seconds=5)
DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


def damaged(data: bytes, changes: list[tuple[float, int]], cut: float) -> bytes:
    """Some bytes changed, more of them near the beginning, where headers are; perhaps the end cut off."""
    found = bytearray(data)
    for place, value in changes:
        found[int(place**3 * len(found))] = value
    return bytes(found[: max(1, int(len(found) * min(1.0, cut)))])


def survives(it: MediaPart, read: Any) -> None:
    try:
        read(it)
    except ForerunError as error:
        assert it.name in str(error) and "\n" not in str(error)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PICTURES), DAMAGE, st.floats(0.2, 2.0))
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_pictures(data: bytes, changes: list[tuple[float, int]], cut: float) -> None:
    survives(part("image", damaged(data, changes, cut)), lambda it: read_image(it, SMALL))


@settings(max_examples=60, deadline=None)
@given(DAMAGE, st.floats(0.2, 2.0))
def test_damaged_films(changes: list[tuple[float, int]], cut: float) -> None:
    survives(part("video", damaged(FILM, changes, cut)), lambda it: frames_and_times(it.data, SMALL))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SOUNDS), DAMAGE, st.floats(0.2, 2.0))
def test_damaged_recordings(data: bytes, changes: list[tuple[float, int]], cut: float) -> None:
    survives(part("audio", damaged(data, changes, cut)), lambda it: heard(it.data, limits=SMALL))
