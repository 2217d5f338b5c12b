"""Films: a few of their frames, chosen by the model's family, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forerun.errors import ForerunError
from forerun.media.containers import FILMS, VIDEO_CODECS, check_codec, decoder_limit, opened
from forerun.media.decoding import check_pixels
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaPart

if TYPE_CHECKING:
    from PIL.Image import Image

USUAL_RATE = 24.0  # frames per second of a film that does not say
Frame = TypeVar("Frame")


@dataclass(frozen=True, slots=True)
class Film(Generic[Frame]):
    """What was kept of a film."""

    frames: list[Frame]
    times: list[float]  # of each, in seconds


def read_film(
    part: MediaPart,
    limits: MediaLimits,
    choose: Callable[[int, float], Sequence[int]],
    keep: Callable[[Image, int], Frame],
) -> Film[Frame]:
    """`choose` says which frames, given how many there are and how many make a second; `keep` what to keep of one,
    given how many are kept. No two decoded frames are in memory at once.
    """
    total, rate = measure(part, limits)
    for _ in range(2):
        wanted = list(choose(total, rate))
        frames, seen = decode(part, limits, wanted, keep)
        if len(frames) == len(wanted):
            return Film(frames, [index / rate for index in wanted])
        total = seen  # packets may hold no frame to be shown
        if not total:
            break
    raise ForerunError(f"{part.name} is truncated or damaged: its frames cannot be read")


def measure(part: MediaPart, limits: MediaLimits) -> tuple[int, float]:
    """Frames, and frames per second, counted without decoding: headers may lie."""
    with opened(part, limits, FILMS) as container:
        stream = film_stream(part, container, limits)
        if not stream.codec_context.width:  # the decoder was told the limit, and did not even look at the first frame
            raise ForerunError(
                f"{part.name} has no frame that can be read, or ones of more than {limits.frame_pixels} pixels"
            )
        check_pixels(part, stream.codec_context.width, stream.codec_context.height, limits.frame_pixels)
        pixels = stream.codec_context.width * stream.codec_context.height
        rate = float(stream.average_rate or stream.guessed_rate or USUAL_RATE)
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0
            if total > limits.video_frames:
                raise ForerunError(f"{part.name} has more than {limits.video_frames} frames: cut it")
            if total * pixels > limits.video_pixels:
                raise ForerunError(
                    f"{part.name} has more than {limits.video_pixels} pixels in all its frames: cut it or shrink it"
                )
    if not total:
        raise ForerunError(f"{part.name} has no frames")
    if not rate > 0 or total / rate > limits.video_seconds:
        raise ForerunError(f"{part.name} is longer than {limits.video_seconds} seconds: cut it")
    return total, rate


def decode(
    part: MediaPart, limits: MediaLimits, wanted: Sequence[int], keep: Callable[[Image, int], Frame]
) -> tuple[list[Frame], int]:
    """What was kept of the wanted frames, and how many frames were decoded."""
    frames: list[Frame] = []
    seen, size = 0, None
    with opened(part, limits, FILMS) as container:
        for frame in container.decode(film_stream(part, container, limits)):
            size = size or (frame.width, frame.height)
            if size != (frame.width, frame.height):  # the limit on all pixels was counted by the first
                raise ForerunError(f"{part.name} cannot be used: its frames are not all of one size")
            if seen == wanted[len(frames)]:
                check_pixels(part, frame.width, frame.height, limits.frame_pixels)
                frames.append(keep(upright(frame), len(wanted)))
            seen += 1
            if len(frames) == len(wanted):
                break
    return frames, seen


def upright(frame: Any) -> Image:
    """As its camera was held."""
    image: Image = frame.to_image()
    turn = round(getattr(frame, "rotation", 0) / 90) * 90 % 360
    return image.rotate(turn, expand=True) if turn else image


def film_stream(part: MediaPart, container: Any, limits: MediaLimits) -> Any:
    """The first film inside a file."""
    from av.stream import Disposition

    covers = Disposition.attached_pic  # pictures that players show beside a recording
    stream = next((stream for stream in container.streams.video if not stream.disposition & covers), None)
    if stream is None:
        raise ForerunError(f"{part.name} holds no film")
    check_codec(part, stream, VIDEO_CODECS)
    # Frames may be larger than the container says, or become so: the decoder refuses them before it asks for memory.
    stream.codec_context.options = decoder_limit(limits)
    return stream
