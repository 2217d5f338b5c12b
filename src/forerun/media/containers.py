"""Files with films and sound: opened by PyAV as what they begin like, so that no file chooses its own reader.

Some formats that ffmpeg knows are lists of other files or addresses; none of them can be reached from here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forerun.errors import ForerunError
from forerun.media.decoding import check_bytes
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaPart

FILMS = "a film in MP4, MOV, WebM, Matroska or AVI format"
SOUNDS = "a recording in WAV, MP3, FLAC, Ogg, M4A, AAC, WebM or Matroska format"
ATOMS = (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")  # what an MP4 or MOV file may begin with
VIDEO_CODECS = frozenset(("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "mpeg4", "mjpeg"))
AUDIO_CODECS = frozenset(("aac", "mp3", "mp3float", "flac", "opus", "libopus", "vorbis", "libvorbis", "alac"))


def container_format(data: bytes) -> str | None:
    """ffmpeg's name for the format, by how the file begins."""
    if data[4:8] in ATOMS:
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data[:4] == b"RIFF":
        return {b"AVI ": "avi", b"WAVE": "wav"}.get(data[8:12])
    for beginning, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")):
        if data.startswith(beginning):
            return name
    if data[:1] == b"\xff" and len(data) > 1:
        if data[1] & 0xF6 == 0xF0:
            return "aac"
        return "mp3" if data[1] & 0xE0 == 0xE0 else None
    return None


@contextmanager
def opened(part: MediaPart, limits: MediaLimits, expected: str) -> Iterator[Any]:
    """The file in PyAV's hands; whatever goes wrong inside the block, but for our memory, is the file's fault."""
    import av

    check_bytes(part, limits.file_bytes)
    kind = container_format(part.data)
    if kind is None:
        raise ForerunError(f"{part.name} is not {expected}")
    options = decoder_limit(limits)  # frames are decoded to find out what is in the file
    try:
        with av.open(io.BytesIO(part.data), format=kind, metadata_errors="ignore", options=options) as container:
            yield container
    except ForerunError:
        raise
    except Exception as error:  # decoders fail in every way there is
        if isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError):
            raise  # ours; ffmpeg's may come of sizes that a damaged file names
        raise ForerunError(f"{part.name} is truncated or damaged: it cannot be read as {kind}") from error


def decoder_limit(limits: MediaLimits) -> dict[str, str]:
    """What a decoder is told: it refuses larger frames before it asks for memory. It counts their padding too."""
    return {"max_pixels": str(2 * limits.frame_pixels + (1 << 16))}


def check_codec(part: MediaPart, stream: Any, known: frozenset[str]) -> None:
    """Is it one of the usual ones?"""
    name = stream.codec_context.name if stream.codec_context is not None else "unknown"
    if name not in known and not (known is AUDIO_CODECS and name.startswith("pcm_")):
        raise ForerunError(f"{part.name} is encoded as {name[:20]}, which is not read: convert it to a usual format")
