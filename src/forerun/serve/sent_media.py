"""Media as clients send them: inside the request, as text that nobody has decoded yet."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ForerunError
from forerun.media.parts import Kind, MediaPart
from forerun.media.sources import from_base64, from_data_uri
from forerun.serve.errors import bad_request


@dataclass(frozen=True, slots=True)
class SentMedia:
    """One picture, film or recording of a request."""

    kind: Kind
    source: str  # a data URI, or base64 alone
    param: str  # the field that it came in, for errors
    bare: bool = False  # base64 alone

    def part(self) -> MediaPart:
        """Decoded, for a reader. It takes a while: not on the event loop."""
        return (from_base64 if self.bare else from_data_uri)(self.kind, self.source, self.param)


def from_url(kind: Kind, url: str, param: str) -> SentMedia:
    """Only data URIs: this server fetches nothing for anybody."""
    if url[:5].lower() != "data:":
        raise bad_request("Media are read from data URIs only: this server fetches no URLs.", param)
    return SentMedia(kind, url, param)


def place(media: SentMedia) -> dict[str, str]:
    """Where it stands in a message."""
    return {"type": media.kind}


def param_of(error: ForerunError, media: tuple[SentMedia, ...]) -> str:
    """Whatever is wrong with a part names it first."""
    return next((one.param for one in media if str(error).startswith(one.param)), media[0].param)
