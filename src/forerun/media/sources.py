"""Where media come from: files, data URIs, bytes and pictures of Pillow's. Nothing is ever fetched from elsewhere."""

from __future__ import annotations

import binascii
import io
import os
import re
import stat
from typing import Any

from forerun.errors import ForerunError
from forerun.media.decoding import check_bytes, too_large, upright
from forerun.media.limits import MediaLimits
from forerun.media.parts import Kind, MediaPart

MAX_BYTES = MediaLimits().file_bytes  # no more of a file is kept in memory
# data:image/png;base64,AAAA, with parameters of the type that say nothing here: data:audio/ogg;codecs=opus;base64,AAAA
DATA_URI = re.compile(r"data:([\w.+-]+)/([\w.+-]+)((?:;[\w.+-]+=[^;,]*)*);base64,", re.IGNORECASE)
NOT_FETCHED = "media come with the request, URLs are not fetched"


def media_part(kind: Kind, source: Any, name: str = "") -> MediaPart:
    """From a path, a data URI, the bytes of a file, or a picture of Pillow's; `name`: what errors call it.

    Whatever is wrong with it is a `ForerunError` of one line, but nobody has looked inside yet.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return _part(kind, bytes(source), name or kind)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return from_data_uri(kind, source, name or kind)
    if isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]+://", source, re.IGNORECASE):
        raise ForerunError(f"{source[:100]}: {NOT_FETCHED}; give a file")
    if isinstance(source, str | os.PathLike):
        return from_file(kind, source)
    if kind == "image" and callable(getattr(source, "save", None)):
        return _part(kind, _as_png(source, name or kind), name or kind)
    raise ForerunError(f"{name or kind} is a {type(source).__name__}; give the path of a file, its bytes or a data URI")


def from_file(kind: Kind, path: str | os.PathLike[str]) -> MediaPart:
    """A file, of which no more is read than may be."""
    name = os.fspath(path)
    try:
        mode = os.stat(name).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe may let us wait, and gives everything once only
            raise ValueError("it is not a regular file")
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ForerunError(f"cannot read the {kind} {name}: {reason}") from error
    return _part(kind, data, name)


def from_data_uri(kind: Kind, uri: str, name: str) -> MediaPart:
    """`data:image/png;base64,...`: its type must be what it is given as."""
    found = DATA_URI.match(uri[:1000])
    if found is None:
        raise ForerunError(f"{name}: a data URI begins with data:{kind}/TYPE;base64,")
    if found[1].lower() != kind:
        raise ForerunError(f"{name} is of type {found[1]}/{found[2]}, which is no {kind}")
    return from_base64(kind, uri[found.end() :], name)


def from_base64(kind: Kind, text: str, name: str) -> MediaPart:
    """The bytes of a file as base64; line breaks in it do not matter."""
    compact = "".join(text.split())
    if len(compact) > MAX_BYTES * 4 // 3 + 4:
        raise too_large(name, MAX_BYTES)
    try:
        data = binascii.a2b_base64(compact, strict_mode=True)
    except (ValueError, binascii.Error):
        raise ForerunError(f"{name} is not valid base64") from None
    return _part(kind, data, name)


def _part(kind: Kind, data: bytes, name: str) -> MediaPart:
    part = MediaPart(kind, data, name)
    check_bytes(part, MAX_BYTES)
    return part


def _as_png(image: Any, name: str) -> bytes:
    """The same pixels as a file, since files are what readers read; upright, since PNG does not keep how."""
    file = io.BytesIO()
    try:
        image = upright(image)
        known = image.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # to PNG
        other = "RGBA" if image.mode.lower().endswith("a") else "RGB"
        (image if known else image.convert(other)).save(file, format="PNG")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ForerunError(f"{name} cannot be used as a picture: {error}") from error
    return file.getvalue()
