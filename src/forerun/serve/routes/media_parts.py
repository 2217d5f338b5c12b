"""Parts of OpenAI's messages that are not text: images, sound, and the videos that other servers added."""

from __future__ import annotations

from typing import Any, Literal

from forerun.serve.errors import bad_request
from forerun.serve.routes.strict import Strict
from forerun.serve.sent_media import SentMedia, from_url

# Names that other APIs use, and what to send here; of files nothing can be read.
OTHER_NAMES = {
    **dict.fromkeys(("input_image", "image"), "send images as 'image_url'"),
    **dict.fromkeys(("input_video", "video"), "send videos as 'video_url'"),
    "audio": "send audio as 'input_audio'",
    **dict.fromkeys(("file", "input_file"), "send text, images, videos or audio"),
}
OWN_NAMES = ("image_url", "video_url", "audio_url", "input_audio")


def refuse_others(part: Any) -> Any:
    """Parts that a client may well send get a message that helps."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in OTHER_NAMES:
        raise bad_request(f"A part of type '{kind}' is not supported: {OTHER_NAMES[kind]}.", "messages")
    if kind in OWN_NAMES and kind not in part:
        raise bad_request(f"A part of type '{kind}' needs '{kind}'.", "messages")
    return part


class ImageUrl(Strict):
    """A data URI; `detail` changes nothing."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Strict):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def sent(self, where: str) -> SentMedia:
        return from_url("image", self.image_url.url, f"{where}.image_url.url")


class Url(Strict):
    """A data URI."""

    url: str


class VideoPart(Strict):
    """A video, in the form that vLLM gave it."""

    type: Literal["video_url"]
    video_url: Url

    def sent(self, where: str) -> SentMedia:
        return from_url("video", self.video_url.url, f"{where}.video_url.url")


class AudioUrlPart(Strict):
    """A recording, in the form that vLLM gave it."""

    type: Literal["audio_url"]
    audio_url: Url

    def sent(self, where: str) -> SentMedia:
        return from_url("audio", self.audio_url.url, f"{where}.audio_url.url")


class InputAudio(Strict):
    """Base64. What it is shows when it is read, whatever the format says."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm"]


class AudioPart(Strict):
    """A recording, in OpenAI's form."""

    type: Literal["input_audio"]
    input_audio: InputAudio

    def sent(self, where: str) -> SentMedia:
        return SentMedia("audio", self.input_audio.data, f"{where}.input_audio.data", bare=True)


AnyMediaPart = ImagePart | VideoPart | AudioUrlPart | AudioPart
