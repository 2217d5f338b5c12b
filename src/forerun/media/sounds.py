"""Recordings: one channel of float32 samples at 16 kHz."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError
from forerun.media.containers import AUDIO_CODECS, SOUNDS, check_codec, opened
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaPart

if TYPE_CHECKING:
    import numpy

RATE = 16_000
RATES = range(4_000, 384_001)  # of a file: others would make a few bytes very long
CHANNELS = 16
PADDING = RATE // 10  # samples: silence that encoders put around a recording does not make it too long


def read_sound(part: MediaPart, limits: MediaLimits, seconds: float) -> numpy.ndarray[Any, Any]:
    """[samples] of at most so many `seconds`; decoding stops soon after, whatever the header says."""
    import numpy
    from av import AudioResampler

    most = int(min(seconds, limits.audio_seconds) * RATE)
    chunks, samples = [], 0
    with opened(part, limits, SOUNDS) as container:
        stream = sound_stream(part, container)
        resampler = AudioResampler(format="flt", rate=RATE)  # one plane: PyAV cannot take more than eight of them
        for frame in chain(container.decode(stream), [None]):  # None: what the resampler still holds
            for piece in resampler.resample(frame):
                # [samples, channels], whose mean it is: ffmpeg would add them up, and that is louder
                chunks.append(piece.to_ndarray().reshape(-1, piece.layout.nb_channels).mean(axis=1))
                samples += len(chunks[-1])
            if samples > most + PADDING:
                raise ForerunError(f"{part.name} is longer than {most / RATE:g} seconds: cut it")
    if not samples:
        raise ForerunError(f"{part.name} holds no sound")
    sound = numpy.concatenate(chunks)[:most].astype(numpy.float32, copy=False)
    if not numpy.isfinite(sound).all():
        raise ForerunError(f"{part.name} is damaged: it holds samples that are not numbers")
    return sound


def sound_stream(part: MediaPart, container: Any) -> Any:
    """The first recording inside a file."""
    if not container.streams.audio:
        raise ForerunError(f"{part.name} holds no sound")
    stream = container.streams.audio[0]
    check_codec(part, stream, AUDIO_CODECS)
    context = stream.codec_context
    if context.sample_rate not in RATES or not 1 <= context.channels <= CHANNELS:
        raise ForerunError(
            f"{part.name} has {context.channels} channels of {context.sample_rate} samples a second: convert it to "
            f"at most {CHANNELS} of {RATES[0]} to {RATES[-1]}"
        )
    context.options = {"max_samples": str(RATES[-1])}  # of one frame
    return stream
