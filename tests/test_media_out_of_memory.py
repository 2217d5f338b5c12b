"""Too little memory for media: said as that, to that request alone, and not as a fault of the file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from fake_media import FakeReader, seeing_tokenizer
from media_files import encoded, film_file, part, picture, sound_file
from PIL import Image
from serve_fakes import FakeEngine, app_for, call, live

from forerun.media import films
from forerun.media.decoding import read_image
from forerun.media.films import read_film
from forerun.media.limits import MediaLimits
from forerun.media.parts import MediaOutOfMemory, MediaPart, MediaPrompt
from forerun.media.sounds import read_sound

LIMITS = MediaLimits()


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_sound_file_is_not_called_damaged_when_memory_runs_out(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    if kind == "image":
        monkeypatch.setattr(Image.Image, "convert", full)
        with pytest.raises(MemoryError):
            read_image(part("image", encoded(picture())), LIMITS)
    elif kind == "video":
        monkeypatch.setattr(films, "upright", full)
        with pytest.raises(MemoryError):
            read_film(part("video", film_file([picture()])), LIMITS, lambda *_: [0], lambda image, _: image)
    else:
        monkeypatch.setattr(numpy, "concatenate", full)
        with pytest.raises(MemoryError):
            read_sound(part("audio", sound_file()), LIMITS, 30)


class FullOnce(FakeReader):
    """There is no room for large pictures."""

    def read(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> MediaPrompt:
        if any(len(part.data) > 10 for part in parts):
            raise MediaOutOfMemory
        return super().read(ids, parts)


def test_a_server_says_503_to_that_request_alone() -> None:
    def ask(data: bytes) -> Any:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        return call(address, "/v1/chat/completions", body)

    tokenizer = seeing_tokenizer()
    with live(app_for(FakeEngine(tokenizer=tokenizer), media=FullOnce(tokenizer))) as address:
        for _ in range(2):
            assert ask(b"small").status == 200
            full = ask(b"a large picture")
            assert full.status == 503 and full.json["error"]["type"] == "unavailable_error"
            assert "not enough free memory" in full.json["error"]["message"]
        messages = [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": base64.b64encode(b"a large picture").decode(),
                        },
                    }
                ],
            }
        ]
        assert call(address, "/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": messages}).status == 503
